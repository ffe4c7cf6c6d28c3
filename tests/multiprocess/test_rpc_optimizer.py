"""`DistributedOptimizer` and `RemoteModule` over real processes, against one process."""

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
    batches,
    made_parameter,
    make,
    worker,
)


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Imported once, not by each rank: what the step of an optimizer imports too."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


def optimizers() -> None:
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
    """Parameters here and on two workers, for some steps, as in one process, to the bit."""
    is_sparse = make_optimizer is not torch.optim.Adam
    tables = [RemoteModule(f"w{one}", bag, (one, is_sparse)) for one in (1, 2)]
    alone = [bag(one, is_sparse) for one in (1, 2)]
    near, own = (make(7).weight for _ in range(2))
    remote = [reference for module in tables for reference in module.remote_parameters()]
    if make_optimizer is torch.optim.SparseAdam:
        together, other = remote, []
    else:
        together, other = [*remote, near], [own]
    optimizer = DistributedOptimizer(make_optimizer, together, **options)
    oracle = make_optimizer([*(one.weight for one in alone), *other], **options)
    for rows, _ in batches(0):
        for modules, weight in ((tables, near), (alone, own)):
            hidden = modules[0](rows[:, :2]) * modules[1](rows[:, 1:])
            loss = (hidden @ weight).square().sum()
            if modules is alone:
                oracle.zero_grad()
            loss.backward()
        optimizer.step()
        oracle.step()
    for reference, module in zip(remote, alone, strict=True):
        assert torch.equal(reference.to_here(), module.weight)
    assert torch.equal(near, own)
    optimizer.step()  # there is no gradient any more
    assert torch.equal(remote[0].to_here(), alone[0].weight)


def bag(seed: int, is_sparse: bool) -> nn.EmbeddingBag:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=is_sparse, dtype=torch.float64)


def check_contexts() -> None:
    """The way that scripts for PyTorch's RPC are written."""
    module, local = RemoteModule("w1", make, (3,)), make(4)
    alone, own = make(3), make(4)
    references = [*module.remote_parameters(), *map(RRef, local.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    oracle = torch.optim.SGD([*alone.parameters(), *own.parameters()], lr=0.1)
    for step in range(3):
        inputs = torch.full((3, 4), step + 1.0, dtype=torch.float64)
        with dist_autograd.context() as context:
            loss = local(module(inputs)).square().sum()
            dist_autograd.backward(context, [loss])
            assert local.weight.grad is None
            seen = dist_autograd.get_gradients(context)
            oracle.zero_grad()
            own(alone(inputs)).square().sum().backward()
            assert own.weight.grad is not None
            assert torch.equal(seen[local.weight], own.weight.grad)
            optimizer.step(context)
            oracle.step()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [module(inputs).sum()])  # that nobody uses
    with dist_autograd.context() as context:
        optimizer.step(context)
    for reference, parameter in zip(module.remote_parameters(), alone.parameters(), strict=True):
        assert torch.equal(reference.to_here(), parameter)
    for one, other in zip(local.parameters(), own.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UsageError, match="all roots need to be scalar"):
        dist_autograd.backward(0, [torch.ones(2, requires_grad=True)])


def check_bad_optimizers() -> None:
    sgd = torch.optim.SGD
    with pytest.raises(UsageError, match="got no parameter"):
        DistributedOptimizer(sgd, [], lr=0.1)
    with pytest.raises(UsageError, match="type dict"):
        DistributedOptimizer(sgd, [{"params": []}], lr=0.1)
    with pytest.raises(UsageError, match="no leaf"):
        DistributedOptimizer(sgd, [torch.ones(2, requires_grad=True) * 2], lr=0.1)
    with pytest.raises(UsageError, match="expected a class"):
        DistributedOptimizer("SGD", [torch.ones(2)], lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="type str"):
        DistributedOptimizer(sgd, [rpc.remote("w1", str)], lr=0.1)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        DistributedOptimizer(sgd, [rpc.remote("w1", made_parameter)], lr=-1.0)


def check_modules() -> None:
    module = RemoteModule("rank:1/cpu", WithOptions, (2,), {"shift": 1.0})
    assert module(torch.ones(2), scale=3.0).tolist() == [7.0, 7.0]
    assert module.forward_async(torch.ones(2)).wait().tolist() == [3.0, 3.0]
    both = nn.Sequential(module, nn.Linear(2, 2))
    assert len(list(both.parameters())) == 2
    both.eval()
    assert module(torch.ones(2)).tolist() == [-1.0, -1.0]
    both.train()
    # As an argument it refers to the same module, and again: there is one.
    assert rpc.rpc_sync("w2", called, (module, torch.ones(2))).tolist() == [3.0, 3.0]
    again = RemoteModule.init_from_module_rref("w1", module.get_module_rref())
    assert again(torch.ones(2)).tolist() == [3.0, 3.0]
    assert "on='w1'" in repr(again)
    # On this worker it is called like on any.
    assert RemoteModule("w0", WithOptions, (1,))(torch.ones(2)).tolist() == [1.0, 1.0]
    check_unsupported(module, both)
    elsewhere = RemoteModule.init_from_module_rref("w2", module.get_module_rref())
    assert (elsewhere.on, elsewhere(torch.ones(2)).tolist()) == ("w1", [3.0, 3.0])
    with pytest.raises(UsageError, match="could not find destination 'nobody'"):
        RemoteModule("nobody", nn.Linear, (2, 2))
    with pytest.raises(UsageError, match="is no device"):
        RemoteModule("w1/toaster", nn.Linear, (2, 2))
    with pytest.raises(UsageError, match="an object of type dict"):
        RemoteModule("w1", dict)
    with pytest.raises(UsageError, match="is SharedDataParallel: it averages"):
        RemoteModule("w1", alone_in_its_group)


def check_unsupported(module: RemoteModule, container: nn.Module) -> None:
    """Methods that would speak of an empty module raise; so do those of a container."""
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


def alone_in_its_group() -> nn.Module:
    group = dist.new_group([1], use_local_synchronization=True)
    return nn.Sequential(SharedDataParallel(nn.Linear(2, 2), group=group))


def called(module: nn.Module, inputs: Tensor) -> Tensor:
    result: Tensor = module(inputs)
    return result


def test_optimizers_equal_one_process(ranks: RankServer) -> None:
    ranks.run(3, optimizers)
