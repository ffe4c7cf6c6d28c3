"""Backward passes in contexts with modules that keep gradients in their own buffers."""

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
    """Import slow modules once, not in each rank."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


def wrap_with_bucket_views(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    SharedDataParallel,
    wrap_with_bucket_views,
    nn.parallel.DistributedDataParallel,
]


def make_input(value: float) -> Tensor:
    """Return an input for which the weight's gradient, averaged over the ranks, is `value`."""
    return torch.full((1, 2), value * (1 + 2 * dist.get_rank()) / dist.get_world_size())


def compute_loss(module: nn.Module, value: float) -> Tensor:
    total: Tensor = module(make_input(value)).sum()
    return total


def check_passes_in_contexts(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with worker():
        module = wrap(nn.Linear(2, 1, bias=False))
        (parameter,) = module.parameters()
        with dist_autograd.context() as context:
            for value in (1.0, 10.0):
                dist_autograd.backward(context, [compute_loss(module, value)])
            gradients = dist_autograd.get_gradients(context)
            assert gradients[parameter].tolist() == [[11.0, 11.0]], "two passes in one context"
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [compute_loss(module, 1.0)])
            kept = dist_autograd.get_gradients(context)[parameter]
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [compute_loss(module, 10.0)])
        assert kept.tolist() == [[1.0, 1.0]], "a gradient kept during the next context"
        compute_loss(module, 1.0).backward()  # type: ignore[no-untyped-call]
        before = parameter.grad
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [compute_loss(module, 10.0)])
            gradient = dist_autograd.get_gradients(context)[parameter]
            assert parameter.grad is before
            assert before is not None
            assert before.tolist() == [[1.0, 1.0]], "grad after a pass in a context"
            assert gradient.tolist() == [[10.0, 10.0]]
            before.fill_(7.0)
            assert gradient.tolist() == [[10.0, 10.0]]
        dist.barrier()


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_gradients_in_buffers(ranks: RankServer, wrap: Callable[[nn.Module], nn.Module]) -> None:
    ranks.run(2, check_passes_in_contexts, wrap)


def step_after_stride_change() -> None:
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


def test_parameters_whose_strides_change(ranks: RankServer) -> None:
    ranks.run(1, step_after_stride_change)
