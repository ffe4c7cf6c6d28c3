"""`DistributedOptimizer` and `RemoteModule` between processes, compared with one process."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import rpc
from phalanx.errors import UsageError
from phalanx.parallel import SharedDataParallel
from phalanx.rpc import DistributedOptimizer, RemoteModule, RRef
from phalanx.rpc import autograd as dist_autograd
from tests.ranks import RankServer
from tests.rpc_training import (
    ROWS,
    make_batches,
    make_linear,
    make_parameter,
    worker,
)


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Import slow modules once, not in each rank."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


def check_all() -> None:
    with worker() as rank:
        if rank == 0:
            for make_optimizer, options in OPTIMIZERS:
                check_optimizer(make_optimizer, options)
            check_contexts()
            check_bad_optimizers()
            check_modules()
        dist.barrier()


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.SparseAdam, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.01}),
]


def check_optimizer(
    make_optimizer: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """Compare local parameters and those of two workers with one process, bit for bit."""
    is_sparse = make_optimizer is not torch.optim.Adam
    tables = [RemoteModule(f"w{seed}", make_bag, (seed, is_sparse)) for seed in (1, 2)]
    reference = [make_bag(seed, is_sparse) for seed in (1, 2)]
    local_weight, reference_weight = (make_linear(7).weight for _ in range(2))
    remote = [rref for module in tables for rref in module.remote_parameters()]
    if make_optimizer is torch.optim.SparseAdam:
        parameters, other = remote, []
    else:
        parameters, other = [*remote, local_weight], [reference_weight]
    optimizer = DistributedOptimizer(make_optimizer, parameters, **options)
    oracle = make_optimizer([*(module.weight for module in reference), *other], **options)
    for rows, _ in make_batches(0):
        for modules, weight in ((tables, local_weight), (reference, reference_weight)):
            hidden = modules[0](rows[:, :2]) * modules[1](rows[:, 1:])
            loss = (hidden @ weight).square().sum()
            if modules is reference:
                oracle.zero_grad()
            loss.backward()
        optimizer.step()
        oracle.step()
    for rref, module in zip(remote, reference, strict=True):
        assert torch.equal(rref.to_here(), module.weight)
    assert torch.equal(local_weight, reference_weight)
    optimizer.step()  # without gradients, as the last step has taken them
    assert torch.equal(remote[0].to_here(), reference[0].weight)


def make_bag(seed: int, is_sparse: bool) -> nn.EmbeddingBag:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=is_sparse, dtype=torch.float64)


def check_contexts() -> None:
    """Use contexts as scripts for PyTorch's RPC do."""
    module, local = RemoteModule("w1", make_linear, (3,)), make_linear(4)
    reference, reference_local = make_linear(3), make_linear(4)
    references = [*module.remote_parameters(), *map(RRef, local.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    oracle = torch.optim.SGD([*reference.parameters(), *reference_local.parameters()], lr=0.1)
    for step in range(3):
        inputs = torch.full((3, 4), step + 1.0, dtype=torch.float64)
        with dist_autograd.context() as context:
            loss = local(module(inputs)).square().sum()
            dist_autograd.backward(context, [loss])
            assert local.weight.grad is None
            gradients = dist_autograd.get_gradients(context)
            oracle.zero_grad()
            reference_local(reference(inputs)).square().sum().backward()
            assert reference_local.weight.grad is not None
            assert torch.equal(gradients[local.weight], reference_local.weight.grad)
            optimizer.step(context)
            oracle.step()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [module(inputs).sum()])  # unused
    with dist_autograd.context() as context:
        optimizer.step(context)
    for rref, parameter in zip(module.remote_parameters(), reference.parameters(), strict=True):
        assert torch.equal(rref.to_here(), parameter)
    for parameter, expected in zip(local.parameters(), reference_local.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    with pytest.raises(UsageError, match="all roots need to be scalar"):
        dist_autograd.backward(0, [torch.ones(2, requires_grad=True)])


def check_bad_optimizers() -> None:
    sgd = torch.optim.SGD
    with pytest.raises(UsageError, match="got no parameter"):
        DistributedOptimizer(sgd, [], lr=0.1)
    with pytest.raises(UsageError, match="type dict"):
        DistributedOptimizer(sgd, [{"params": []}], lr=0.1)
    with pytest.raises(UsageError, match="not a leaf"):
        DistributedOptimizer(sgd, [torch.ones(2, requires_grad=True) * 2], lr=0.1)
    with pytest.raises(UsageError, match="expected a class"):
        DistributedOptimizer("SGD", [torch.ones(2)], lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="type str"):
        DistributedOptimizer(sgd, [rpc.remote("w1", str)], lr=0.1)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        DistributedOptimizer(sgd, [rpc.remote("w1", make_parameter)], lr=-1.0)


def check_modules() -> None:
    module = RemoteModule("rank:1/cpu", WithOptions, (2,), {"shift": 1.0})
    assert module(torch.ones(2), scale=3.0).tolist() == [7.0, 7.0]
    assert module.forward_async(torch.ones(2)).wait().tolist() == [3.0, 3.0]
    # The call keeps a module alive to which nothing else refers here.
    future = RemoteModule("w1", WithOptions, (2,), {"shift": 1.0}).forward_async(torch.ones(2))
    assert future.wait().tolist() == [3.0, 3.0]
    both = nn.Sequential(module, nn.Linear(2, 2))
    assert len(list(both.parameters())) == 2
    both.eval()
    assert module(torch.ones(2)).tolist() == [-1.0, -1.0]
    both.train()
    # As an argument, or from a second reference, it is the same module.
    assert rpc.rpc_sync("w2", call_module, (module, torch.ones(2))).tolist() == [3.0, 3.0]
    second = RemoteModule.init_from_module_rref("w1", module.get_module_rref())
    assert second(torch.ones(2)).tolist() == [3.0, 3.0]
    assert "on='w1'" in repr(second)
    # It works on this worker too.
    assert RemoteModule("w0", WithOptions, (1,))(torch.ones(2)).tolist() == [1.0, 1.0]
    check_unsupported(module, both)
    redirected = RemoteModule.init_from_module_rref("w2", module.get_module_rref())
    assert (redirected.on, redirected(torch.ones(2)).tolist()) == ("w1", [3.0, 3.0])
    with pytest.raises(UsageError, match="could not find destination 'nobody'"):
        RemoteModule("nobody", nn.Linear, (2, 2))
    with pytest.raises(UsageError, match="is not a device"):
        RemoteModule("w1/toaster", nn.Linear, (2, 2))
    with pytest.raises(UsageError, match="an object of type dict"):
        RemoteModule("w1", dict)
    with pytest.raises(UsageError, match="is SharedDataParallel: it averages"):
        RemoteModule("w1", make_data_parallel)


def check_unsupported(module: RemoteModule, container: nn.Module) -> None:
    """Methods that would act on an empty module raise; so do those of a container."""
    with pytest.raises(UsageError, match="use ``remote_parameters``"):
        module.parameters()
    unsupported: list[Callable[[], object]] = [
        module.state_dict,
        container.state_dict,
        lambda: module.load_state_dict({}),
        lambda: container.load_state_dict({}, strict=False),
        lambda: module.apply(print),
        lambda: container.apply(lambda _module: None),
        module.half,
        module.cuda,
        lambda: module.to("cpu"),
        module.share_memory,
        module.zero_grad,
        module.requires_grad_,
        module.named_parameters,
        module.buffers,
        module.modules,
        module.named_modules,
        lambda: module.register_forward_hook(print),
        lambda: module.register_buffer("extra", torch.ones(1)),
    ]
    for method in unsupported:
        with pytest.raises(UsageError, match="not supported for RemoteModule"):
            method()
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
        torch.save(module, io.BytesIO())
    assert next(container.half().parameters()).dtype is torch.half
    saved = module.get_module_rref().rpc_sync().state_dict()
    assert saved.keys() == module.get_module_rref().to_here().state_dict().keys()


class WithOptions(nn.Module):
    def __init__(self, factor: int, shift: float = 0.0) -> None:
        super().__init__()
        self.factor, self.shift = factor, shift

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        if not self.training:
            return -torch.ones_like(inputs)
        return inputs * self.factor * scale + self.shift


def make_data_parallel() -> nn.Module:
    group = dist.new_group([1], use_local_synchronization=True)
    return nn.Sequential(SharedDataParallel(nn.Linear(2, 2), group=group))


def call_module(module: nn.Module, inputs: Tensor) -> Tensor:
    result: Tensor = module(inputs)
    return result


def test_optimizers_match_one_process(ranks: RankServer) -> None:
    ranks.run(3, check_all)
