"""Embedding modules of other workers, read in shared memory: results, gradients and revocation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import rpc
from phalanx.errors import CallTimeout, PeerLost
from phalanx.rpc import DistributedOptimizer, RemoteModule, RRef
from phalanx.rpc import autograd as dist_autograd
from phalanx.rpc.agent import agent
from tests.descriptors import list_descriptors
from tests.ranks import RankServer
from tests.rpc_training import LIMIT, wait_until_free, worker
from tests.seeds import fresh_seed
from tests.waiting import stopped, wait_for

ROWS, WIDTH = 50, 5


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Import slow modules once, not in each rank."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


def make_pair(
    owner: str, module_class: type[nn.Module] = nn.EmbeddingBag, **options: Any
) -> tuple[RemoteModule, Any]:
    """Return a remote module and the same module in this process."""
    options = {"sparse": True, "dtype": torch.float64, **options}
    weight = torch.randn(ROWS, WIDTH, dtype=options["dtype"])
    remote = RemoteModule(owner, module_class, (ROWS, WIDTH), {**options, "_weight": weight})
    return remote, module_class(ROWS, WIDTH, _weight=weight.clone(), **options)


def is_mapped(remote: RemoteModule) -> bool:
    """Run forward passes; return whether the last one read shared memory."""
    with torch.no_grad():
        for _ in range(2):
            remote(torch.zeros(1, 1, dtype=torch.int64))
    return remote._mapped is not None


# ---- results and gradients ----


def random_bags(**_: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randint(ROWS, (7, 3)),), {}


def random_offsets(last: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    offsets = [0, 2, 2, 5, *([9] if last else [])]
    return (torch.randint(ROWS, (9,)), torch.tensor(offsets)), {}


def random_weights() -> tuple[tuple[Any, ...], dict[str, Any]]:
    (rows,), _ = random_bags()
    return (rows,), {"per_sample_weights": torch.randn(7, 3, dtype=torch.float64)}


MODULES: list[tuple[type[nn.Module], dict[str, Any], Callable[[], Any]]] = [
    (nn.EmbeddingBag, {"mode": "sum"}, random_bags),
    (nn.EmbeddingBag, {"mode": "mean", "dtype": torch.float32}, random_offsets),
    (nn.EmbeddingBag, {"mode": "sum"}, random_weights),
    (
        nn.EmbeddingBag,
        {"mode": "sum", "include_last_offset": True, "padding_idx": 3},
        lambda: random_offsets(last=True),
    ),
    (nn.EmbeddingBag, {"mode": "max", "sparse": False}, random_bags),
    (nn.Embedding, {"padding_idx": 1}, random_bags),
    (nn.Embedding, {"sparse": False, "dtype": torch.float32}, random_bags),
]
OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.3}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]


def check_training() -> None:
    """Train two tables on two workers; compare with one process, bit for bit."""
    with worker() as rank:
        if rank == 0:
            torch.manual_seed(fresh_seed())
            check_optimizers()
            check_contexts()
            check_returned_graph()
            check_errors()
            check_failed_future()
            wait_until_free([0, 1, 2])
        dist.barrier()


def check_optimizers() -> None:
    for module_class, options, make_inputs in MODULES:
        for make_optimizer, settings in OPTIMIZERS:
            pairs = [make_pair(on, module_class, **options) for on in ("w1", "w2")]
            check_steps(pairs, make_inputs, make_optimizer, settings)


def check_steps(
    pairs: list[tuple[RemoteModule, Any]],
    make_inputs: Callable[[], Any],
    make_optimizer: Callable[..., torch.optim.Optimizer],
    settings: dict[str, Any],
) -> None:
    remotes, references = zip(*pairs, strict=True)
    rrefs = [rref for remote in remotes for rref in remote.remote_parameters()]
    optimizer = DistributedOptimizer(make_optimizer, rrefs, **settings)
    oracle = make_optimizer([reference.weight for reference in references], **settings)
    for _ in range(3):
        args, kwargs = make_inputs()

        def loss(modules: Any, args: Any = args, kwargs: Any = kwargs) -> Tensor:
            first, second = (module(*args, **kwargs) for module in modules)
            # One of them is used twice: two gradients of one table.
            return (first * second + modules[0](*args, **kwargs).sin()).sum()

        with torch.no_grad():
            assert torch.equal(loss(remotes), loss(references))
        oracle.zero_grad()
        loss(remotes).backward()
        loss(references).backward()
        optimizer.step()
        oracle.step()
        assert (
            remotes[0].forward_async(*args, **kwargs).wait().equal(references[0](*args, **kwargs))
        )
    for rref, reference in zip(rrefs, references, strict=True):
        assert rref.to_here().equal(reference.weight)
    assert all(map(is_mapped, remotes))


def check_contexts() -> None:
    remote, reference = make_pair("w1", mode="sum")
    optimizer = DistributedOptimizer(torch.optim.SGD, remote.remote_parameters(), lr=0.5)
    rows = torch.randint(ROWS, (4, 2))
    assert is_mapped(remote)
    remote(rows).sum().backward()  # not of the context
    with dist_autograd.context() as context:
        loss = remote(rows).square().sum()
        dist_autograd.backward(context, [loss], retain_graph=True)
        dist_autograd.backward(context, [loss])
        optimizer.step(context)
    loss = reference(rows).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    assert rpc.rpc_sync("w1", copy_weight, (remote.get_module_rref(),)).equal(reference.weight)


def copy_weight(module: RRef[Any]) -> Tensor:
    return module.local_value().weight.detach().clone()  # type: ignore[no-any-return]


def check_returned_graph() -> None:
    """Rows read in memory go to their owner and to another worker, and results of both return."""
    remote, reference = make_pair("w1", mode="sum")
    factor = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
    rows = torch.randint(ROWS, (4, 2))
    assert is_mapped(remote)
    pooled = remote(rows)
    parts = [rpc.rpc_sync(on, square, (pooled * factor,)) for on in ("w1", "w2")]
    (parts[0] * parts[1] + pooled).sum().backward()
    gradient = rpc.rpc_sync("w1", kept_gradient, (remote.get_module_rref(), 0))
    local_factor = factor.detach().clone().requires_grad_()
    pooled = reference(rows)
    parts = [square(pooled * local_factor) for _ in range(2)]
    (parts[0] * parts[1] + pooled).sum().backward()
    torch.testing.assert_close(gradient.to_dense(), reference.weight.grad.to_dense())
    torch.testing.assert_close(factor.grad, local_factor.grad)


def square(tensor: Tensor) -> Tensor:
    return tensor * tensor


def kept_gradient(module: RRef[Any], worker_id: int) -> Tensor:
    """Return the gradient that is kept for a worker, and drop it."""
    from phalanx.rpc.autograd.gradients import Root
    from phalanx.rpc.autograd.graph import graph

    (gradient,) = graph().gradients.take(Root(worker_id), module.local_value().parameters())
    assert gradient is not None
    return gradient


def check_errors() -> None:
    remote, reference = make_pair("w1", mode="sum")
    assert is_mapped(remote)
    invalid = torch.tensor([[ROWS]])
    with pytest.raises((IndexError, RuntimeError)) as expected:
        reference(invalid)
    with pytest.raises(type(expected.value)):
        remote(invalid)
    with pytest.raises(TypeError):
        remote(nothing=1)


def fail_later() -> torch.futures.Future[Any]:
    remote, _ = make_pair("w1", mode="sum")
    is_mapped(remote)
    return remote.forward_async(torch.tensor([[ROWS]]))


def check_failed_future() -> None:
    """The future keeps this frame, and those of its callers: they must not keep the module."""
    with pytest.raises((IndexError, RuntimeError)):
        fail_later().wait()


def test_training_matches_one_process(ranks: RankServer) -> None:
    ranks.run(3, check_training)


# ---- modules that are used by calls ----


class Doubled(nn.EmbeddingBag):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def make_bag() -> nn.EmbeddingBag:
    return nn.EmbeddingBag(ROWS, WIDTH, sparse=True)


def check_calls() -> None:
    with worker() as rank:
        if rank == 0:
            bag, options = nn.EmbeddingBag, {"sparse": True}
            for remote in (
                RemoteModule("w1", Doubled, (ROWS, WIDTH), options),
                RemoteModule("w1", make_bag),
                RemoteModule("w1", bag, (ROWS, WIDTH), {**options, "max_norm": 1.0}),
                RemoteModule("w1", bag, (10_000, WIDTH)),  # its dense gradient is too large
                RemoteModule("w0", bag, (ROWS, WIDTH), options),
                RemoteModule.init_from_module_rref("w1", make_pair("w1")[0].get_module_rref()),
            ):
                assert not is_mapped(remote)
        dist.barrier()


def test_other_modules_are_used_by_calls(ranks: RankServer) -> None:
    ranks.run(2, check_calls)


# ---- revocation ----

READ: list[RemoteModule] = []
KEPT: list[Any] = []


def read(remote: RemoteModule, rows: Tensor) -> tuple[Tensor, bool]:
    """Return the result of a module on another trainer, and whether it was read in memory."""
    READ[:] = READ or [remote]
    result = READ[0](rows).detach()
    return result, is_mapped(READ[0])


def keep(rref: RRef[Any]) -> None:
    KEPT[:] = [rref.local_value()]


def replace_weight() -> None:
    KEPT[0].weight = nn.Parameter(torch.ones(ROWS, WIDTH, dtype=torch.float64))


def check_revocation() -> None:
    with worker() as rank:
        if rank == 0:
            check_harmless()
            check_replacement()
            check_parameter()
        dist.barrier()


def check_harmless() -> None:
    remote, reference = make_pair("w2", mode="sum")
    rows = torch.randint(ROWS, (4, 2))
    assert is_mapped(remote)
    assert remote(rows).equal(reference(rows))
    module = remote.get_module_rref().rpc_sync()
    state = module.state_dict()
    module.load_state_dict({"weight": 2 * state["weight"]})
    remote.eval()
    remote.train()
    copy = remote.get_module_rref().to_here()
    assert copy.weight.equal(2 * state["weight"])
    assert is_mapped(remote)
    assert remote(rows).equal(copy(rows))
    module.load_state_dict(state, assign=True)
    assert not is_mapped(remote)
    assert remote(rows).equal(reference(rows))


def check_replacement() -> None:
    """Two readers; then a function on the owner gets the module, and changes it later."""
    remote, reference = make_pair("w2", mode="sum")
    rows = torch.randint(ROWS, (4, 2))
    assert is_mapped(remote)
    pooled = remote(rows)
    result, is_read = rpc.rpc_sync("w1", read, (remote, rows))
    assert is_read
    assert result.equal(reference(rows))
    rpc.rpc_sync("w2", keep, (remote.get_module_rref(),))
    rpc.rpc_sync("w2", replace_weight)
    assert not is_mapped(remote)
    ones = torch.full((4, WIDTH), 2.0, dtype=torch.float64)
    assert remote(rows).equal(ones)
    result, is_read = rpc.rpc_sync("w1", read, (remote, rows))
    assert not is_read
    assert result.equal(ones)
    # A new reader makes calls too.
    assert not is_mapped(remote)
    # A graph from before belongs to the weight from before, which no parameter is any more.
    pooled.sum().backward()
    rpc.rpc_sync("w1", READ.clear)
    rpc.rpc_sync("w2", KEPT.clear)


def check_parameter() -> None:
    remote, reference = make_pair("w2", mode="sum")
    rows = torch.randint(ROWS, (4, 2))
    assert remote(rows).equal(reference(rows))
    (parameter,) = remote.remote_parameters()
    assert is_mapped(remote)
    rpc.rpc_sync("w2", scale, (parameter,))
    assert not is_mapped(remote)
    assert remote(rows).equal(2 * reference(rows))


def scale(parameter: RRef[nn.Parameter]) -> None:
    parameter.local_value().data = parameter.local_value().detach() * 2


def test_use_by_the_owner_revokes_mappings(ranks: RankServer) -> None:
    ranks.run(3, check_revocation)


def check_stopped_reader() -> None:
    """The owner cannot hand out a module to code of the user while a reader is stopped."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=1.0))
    if rank == 0:
        remote, _ = make_pair("w2", mode="sum")
        rows = torch.randint(ROWS, (4, 2))
        assert rpc.rpc_sync("w1", read, (remote, rows), timeout=LIMIT)[1]
        pid = rpc.rpc_sync("w1", os.getpid)
        with stopped(pid):
            for _ in range(2):
                with pytest.raises(CallTimeout, match="'w1'"):
                    rpc.rpc_sync("w2", keep, (remote.get_module_rref(),), timeout=LIMIT)
        rpc.rpc_sync("w2", keep, (remote.get_module_rref(),), timeout=LIMIT)
        assert not rpc.rpc_sync("w1", read, (remote, rows), timeout=LIMIT)[1]
        for name in ("w1", "w2"):
            rpc.rpc_sync(name, READ.clear)
            rpc.rpc_sync(name, KEPT.clear)
    rpc.shutdown(timeout=30)


def test_stopped_reader_delays_use_by_the_owner(ranks: RankServer) -> None:
    ranks.run(3, check_stopped_reader)


# ---- the ends of workers and of modules ----


def die_when_used(rows: Tensor) -> None:
    """Use a module of another worker before and after the death of that worker."""
    remote, _ = make_pair("w1", mode="sum")
    remote(rows)
    assert is_mapped(remote)
    loss = remote(rows).sum()
    pid = rpc.rpc_sync("w1", os.getpid)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: agent().peers[1].has_died)
    for use in (lambda: remote(rows), loss.backward):
        with pytest.raises(PeerLost, match="'w1'"):
            use()


def check_death() -> None:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}")
    if rank == 0:
        die_when_used(torch.randint(ROWS, (4, 2)))
        rpc.shutdown(graceful=False)
    else:
        rpc.shutdown(timeout=30)


def test_death_of_the_owner_is_named(ranks: RankServer) -> None:
    first, second = ranks.start(2, check_death).join()
    assert first.value is None
    assert second.code == -signal.SIGKILL


def open_descriptors() -> int:
    return len(list_descriptors())


def train_one_step() -> None:
    remote, _ = make_pair("w1")
    optimizer = DistributedOptimizer(torch.optim.SGD, remote.remote_parameters(), lr=0.1)
    for _ in range(3):
        remote(torch.randint(ROWS, (4, 2))).sum().backward()
    assert is_mapped(remote)
    optimizer.step()


def check_memory() -> None:
    with worker() as rank:
        if rank == 0:
            train_one_step()
            wait_until_free([0, 1])
            before = [open_descriptors(), rpc.rpc_sync("w1", open_descriptors)]
            for _ in range(20):
                train_one_step()
            wait_until_free([0, 1])
            # References to a value end a moment later.
            wait_for(lambda: rpc.rpc_sync("w1", open_descriptors) <= before[1], LIMIT)
            assert open_descriptors() <= before[0]
        dist.barrier()


def test_modules_leave_no_memory(ranks: RankServer) -> None:
    ranks.run(2, check_memory)
