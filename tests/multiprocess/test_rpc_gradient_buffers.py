"""Backward passes in contexts, and modules that keep gradients in buffers of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.parallel import SharedDataParallel
from phalanx.rpc import DistributedOptimizer
from phalanx.rpc import autograd as dist_autograd
from tests.ranks import RankServer
from tests.rpc_training import worker


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Import once, not in each rank, the modules that take long."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


def with_buckets(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    SharedDataParallel,
    with_buckets,
    nn.parallel.DistributedDataParallel,
]


def input_of(value: float) -> Tensor:
    """The input whose gradient with respect to the weight is this, averaged over the ranks."""
    return torch.full((1, 2), value * (1 + 2 * dist.get_rank()) / dist.get_world_size())


def loss_of(module: nn.Module, value: float) -> Tensor:
    total: Tensor = module(input_of(value)).sum()
    return total


def passes_in_contexts(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with worker():
        module = wrap(nn.Linear(2, 1, bias=False))
        (parameter,) = module.parameters()
        with dist_autograd.context() as context:
            for value in (1.0, 10.0):
                dist_autograd.backward(context, [loss_of(module, value)])
            gradients = dist_autograd.get_gradients(context)
            assert gradients[parameter].tolist() == [[11.0, 11.0]], "two passes in one context"
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss_of(module, 1.0)])
            held = dist_autograd.get_gradients(context)[parameter]
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss_of(module, 10.0)])
        assert held.tolist() == [[1.0, 1.0]], "a gradient held over the next context"
        loss_of(module, 1.0).backward()  # type: ignore[no-untyped-call]
        before = parameter.grad
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss_of(module, 10.0)])
            made = dist_autograd.get_gradients(context)[parameter]
            assert parameter.grad is before
            assert before is not None
            assert before.tolist() == [[1.0, 1.0]], "grad after a pass in a context"
            assert made.tolist() == [[10.0, 10.0]]
            before.fill_(7.0)
            assert made.tolist() == [[10.0, 10.0]]
        dist.barrier()


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_gradients_in_buffers(ranks: RankServer, wrap: Callable[[nn.Module], nn.Module]) -> None:
    ranks.run(2, passes_in_contexts, wrap)


def step_after_other_strides() -> None:
    with worker():
        parameter = nn.Parameter(torch.zeros(2, 2))
        optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=1.0)
        factors = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
        parameter.data = parameter.data.t()  # the same address
        (parameter * factors).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert torch.equal(parameter, -factors)
        parameter.data = parameter.data[:1]
        parameter.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert torch.equal(parameter, -factors[:1] - 1)


def test_parameters_whose_data_change_their_strides(ranks: RankServer) -> None:
    ranks.run(1, step_after_other_strides)
