"""Training through calls: `loss.backward()` between processes, compared with one process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from phalanx import rpc
from phalanx.errors import PeerLost
from phalanx.parallel import SharedDataParallel
from phalanx.rpc import DistributedOptimizer, RemoteModule, RRef
from phalanx.rpc import autograd as dist_autograd
from phalanx.rpc.autograd.graph import graph
from tests.ranks import RankServer
from tests.rpc_training import (
    LIMIT,
    make_batches,
    make_dense,
    make_linear,
    make_parameter,
    make_table,
    wait_until_free,
    worker,
)


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Import slow modules once, not in each rank."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


# ---- two trainers, a master that controls them, a server ----


def run_hybrid(wrapper: str) -> None:
    with worker() as rank:
        group = dist.new_group([0, 1])
        GROUPS[:] = [group]
        dist.barrier()
        if rank == 3:
            bags = RemoteModule("w2", make_table, (1,))
            futures = [
                rpc.rpc_async(f"w{trainer}", train, (bags, wrapper, trainer)) for trainer in (0, 1)
            ]
            losses = [future.wait() for future in futures]
            (weight,) = (reference.to_here() for reference in bags.remote_parameters())
            assert rpc.rpc_sync("w2", has_no_grad, (bags.get_module_rref(),))
            check_hybrid(losses, weight.detach())
            del weight
            wait_until_free([0, 1, 2, 3])
        dist.barrier()


GROUPS: list[Any] = []


def has_no_grad(module: RRef[nn.Module]) -> bool:
    return all(parameter.grad is None for parameter in module.local_value().parameters())


def train(bags: RemoteModule, wrapper: str, rank: int) -> list[float]:
    (group,) = GROUPS
    local = make_dense(2)
    if wrapper == "DDP":
        model: nn.Module = DistributedDataParallel(local, process_group=group)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    else:
        model = SharedDataParallel(local, group=group)
        own = model.optimizer(torch.optim.SGD, lr=0.5)
    remote = DistributedOptimizer(torch.optim.SGD, bags.remote_parameters(), lr=0.5)
    losses = []
    for rows, labels in make_batches(rank):
        loss = cross_entropy(model(bags(rows)), labels)
        own.zero_grad()
        remote.zero_grad()
        loss.backward()
        # Synchronous: no trainer updates before all lookups, or looks up before all updates.
        dist.barrier(group)
        own.step()
        remote.step()
        dist.barrier(group)
        losses.append(loss.item())
    return losses


def check_hybrid(losses: list[list[float]], weight: Tensor) -> None:
    bags, model = make_table(1), make_dense(2)
    optimizer = torch.optim.SGD([*bags.parameters(), *model.parameters()], lr=0.5)
    for step, both in enumerate(zip(make_batches(0), make_batches(1), strict=True)):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rank, (rows, labels) in enumerate(both):
            loss = cross_entropy(model(bags(rows)), labels)
            assert losses[rank][step] == pytest.approx(loss.item(), rel=1e-12)
            total = total + loss
        total.backward()
        # Data parallelism averages gradients; the trainers' steps of the table add up.
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        optimizer.step()
    torch.testing.assert_close(weight, bags.weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrapper", ["DDP", "SharedDataParallel"])
def test_hybrid_losses_match_one_process(ranks: RankServer, wrapper: str) -> None:
    ranks.run(4, run_hybrid, wrapper)


# ---- graphs over several workers ----


class Tower(nn.Module):
    """A module on worker 1 with a part on worker 2, which calls the last part on worker 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make_linear(3)
        self.rest = RemoteModule("w2", Middle)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        return self.rest(hidden) + hidden + inputs


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle = make_linear(4)

    def forward(self, inputs: Tensor) -> Tensor:
        return rpc.rpc_sync("w0", call_last, (self.middle(inputs),)) * inputs


LAST: list[nn.Module] = []


def call_last(inputs: Tensor) -> Tensor:
    return LAST[0](inputs).tanh()


def run_nested() -> None:
    with worker() as rank:
        LAST[:] = [make_linear(5)]
        dist.barrier()
        if rank == 0:
            check_nested()
            check_references()
            check_modes()
            wait_until_free([0, 1, 2])
        dist.barrier()


def check_nested() -> None:
    tower = RemoteModule("w1", Tower)
    parts = [make_linear(seed) for seed in (3, 4, 5)]
    first, middle, end = parts
    start = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    reference_start = start.detach().clone().requires_grad_()

    def reference(inputs: Tensor) -> Tensor:
        hidden = first(inputs).tanh()
        return end(middle(hidden)).tanh() * hidden + hidden + inputs

    # The same module twice, and the input directly: gradients are summed in several places.
    (tower(tower(start.sin()) * start).square().sum() + start.exp().sum()).backward()
    (
        reference(reference(reference_start.sin()) * reference_start).square().sum()
        + reference_start.exp().sum()
    ).backward()
    torch.testing.assert_close(start.grad, reference_start.grad)
    assert_gradients_close(dict(LAST[0].named_parameters()), end)
    assert_gradients_close(
        rpc.rpc_sync("w1", kept_gradients, (tower.get_module_rref(), "first", 0)), first
    )
    assert_gradients_close(
        rpc.rpc_sync("w1", kept_gradients_below, (tower.get_module_rref(), 0)), middle
    )


def kept_gradients(module: RRef[nn.Module], part: str, root: int) -> dict[str, Tensor | None]:
    """Return the gradients of a part that are kept for a worker."""
    gradients = graph().gradients.peek(graph().root._replace(worker=root))
    named = getattr(module.local_value(), part).named_parameters()
    return {name: gradients.get(parameter) for name, parameter in named}


def kept_gradients_below(tower: RRef[Any], root: int) -> dict[str, Tensor | None]:
    below = tower.local_value().rest.get_module_rref()
    gradients: dict[str, Tensor | None] = rpc.rpc_sync(
        "w2", kept_gradients, (below, "middle", root)
    )
    return gradients


def assert_gradients_close(gradients: dict[str, Any], oracle: nn.Module) -> None:
    for name, parameter in oracle.named_parameters():
        own = gradients[name]
        gradient = own.grad if isinstance(own, nn.Parameter) else own
        torch.testing.assert_close(gradient, parameter.grad)


def check_references() -> None:
    """Check values that stay on a worker with their graphs, and fetched parameters."""
    start = torch.randn(4, dtype=torch.float64, requires_grad=True)
    weight = rpc.remote("w1", make_parameter)
    product = rpc.remote("w1", multiply, (start * 2, weight))
    second_product = rpc.remote("w2", multiply, (start, product))
    loss = (second_product.to_here() * weight.to_here() + product.to_here()).sum()
    loss.backward()
    reference_start, reference_weight = start.detach().clone().requires_grad_(), make_parameter()
    (
        reference_start * (reference_start * 2 * reference_weight) * reference_weight
        + reference_start * 2 * reference_weight
    ).sum().backward()
    torch.testing.assert_close(start.grad, reference_start.grad)
    gradient = rpc.rpc_sync("w1", get_gradient, (weight, 0))
    torch.testing.assert_close(gradient, reference_weight.grad)


def multiply(inputs: Tensor, weight: RRef[Tensor]) -> Tensor:
    return inputs * weight.to_here()


def get_gradient(parameter: RRef[Tensor], root: int) -> Tensor | None:
    gradients = graph().gradients.peek(graph().root._replace(worker=root))
    return gradients.get(parameter.local_value())


def check_modes() -> None:
    """If the caller does not record gradients, neither does the callee."""
    module = RemoteModule("w1", make_linear, (3,))
    inputs = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        assert not module(inputs).requires_grad
        assert not module.forward_async(inputs).wait().requires_grad
        assert not module.remote_parameters()[0].to_here().requires_grad
        assert rpc.rpc_sync("w1", torch.is_grad_enabled) is False
    assert rpc.rpc_sync("w1", torch.is_grad_enabled) is True
    result = module.forward_async(inputs).wait()
    result.sum().backward(retain_graph=True)
    result.sum().backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        result.sum().backward()


def test_graph_over_three_workers(ranks: RankServer) -> None:
    ranks.run(3, run_nested)


# ---- several trainers of the same parameters ----


def concurrent_trainers() -> None:
    with worker() as rank:
        dist.barrier()
        module = RRef(make_linear(3)) if rank == 0 else None
        shared = [module]
        if rank == 0:
            futures = [
                rpc.rpc_async(f"w{worker_id}", train_separately, (module, worker_id))
                for worker_id in (1, 2, 3)
            ]
            gradients = [future.wait() for future in futures]
            assert module is not None
            check_separate_gradients(module, gradients)
            check_server_steps(module)
        del shared
        dist.barrier()


def train_separately(module: RRef[nn.Module], rank: int) -> Tensor:
    """Run many passes concurrently with other trainers; then worker 1 alone makes a step."""
    remote = RemoteModule.init_from_module_rref("w0", module)
    inputs = torch.full((2, 4), float(rank), dtype=torch.float64, requires_grad=True)
    for _ in range(20):
        remote(inputs).sum().backward()
    result = remote(inputs)
    optimizer = DistributedOptimizer(torch.optim.SGD, remote.remote_parameters(), lr=1.0)
    if rank == 1:
        optimizer.step()
        result.sum().backward()  # its parameters have changed since
        optimizer.zero_grad()
    assert inputs.grad is not None
    return inputs.grad


def check_separate_gradients(module: RRef[nn.Module], gradients: list[Tensor]) -> None:
    own = module.local_value()
    assert isinstance(own, nn.Linear)
    for rank, gradient in enumerate(gradients, 1):
        assert gradient.shape == (2, 4)
        kept = graph().gradients.peek(graph().root._replace(worker=rank))
        if rank == 1:
            assert not kept
        else:
            torch.testing.assert_close(kept[own.weight], torch.full_like(own.weight, 40.0 * rank))
    torch.testing.assert_close(own.bias.detach(), make_linear(3).bias.detach() - 40.0)
    assert own.weight.grad is None


def check_server_steps(module: RRef[nn.Module]) -> None:
    """With `mix_gradients`, the gradients of all trainers are summed."""
    own = module.local_value()
    assert isinstance(own, nn.Linear)
    dist_autograd.mix_gradients(own.parameters())
    for worker_id in (1, 2, 3):
        rpc.rpc_sync(f"w{worker_id}", run_once, (module, worker_id))
    assert own.weight.grad is not None
    torch.testing.assert_close(own.weight.grad, torch.full_like(own.weight, 12.0))
    dist_autograd.mix_gradients(own.parameters(), mixed=False)


def run_once(module: RRef[nn.Module], rank: int) -> None:
    inputs = torch.full((2, 4), float(rank), dtype=torch.float64)
    module.rpc_sync().forward(inputs).sum().backward()


def test_gradients_of_trainers_are_separate(ranks: RankServer) -> None:
    ranks.run(4, concurrent_trainers)


# ---- death ----


def run_with_death() -> str:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}")
    if rank == 1:
        module = RemoteModule("w0", make_linear, (3,))
        module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        result = module(torch.ones(1, 4, dtype=torch.float64))  # worker 0 keeps its graph
        dist.barrier()
        dist.barrier()
        assert result.requires_grad
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        victim = RemoteModule("w1", make_linear, (3,))
        result = victim(torch.ones(1, 4, dtype=torch.float64))
        optimizer = DistributedOptimizer(torch.optim.SGD, victim.remote_parameters(), lr=0.1)
    dist.barrier()
    if rank == 0:
        root = graph().root._replace(worker=1)
        assert graph().pending
        assert graph().gradients.peek(root)
    dist.barrier()
    if rank == 0:
        end = time.monotonic() + LIMIT
        while graph().pending or graph().gradients.peek(root):
            assert time.monotonic() < end
            time.sleep(0.01)
        rpc.shutdown(graceful=False)
        return ""
    with pytest.raises(PeerLost, match="'w1'") as first:
        run_backward_until_lost(result.sum())
    with pytest.raises(PeerLost, match="'w1'"):
        optimizer.step()
    rpc.shutdown(graceful=False)
    return str(first.value)


def run_backward_until_lost(loss: Tensor) -> None:
    """Repeat backward passes until the peer is lost; the ranks' time limit ends this otherwise."""
    while True:
        loss.backward(retain_graph=True)


def test_dead_worker_is_named_and_its_graph_freed(ranks: RankServer) -> None:
    exits = ranks.start(3, run_with_death).join()
    assert exits[1].code == -signal.SIGKILL
    assert exits[0].value == ""
    assert "'w1'" in exits[2].value
