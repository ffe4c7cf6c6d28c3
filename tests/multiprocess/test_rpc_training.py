"""Training through calls: plain `loss.backward()` over real processes, against one process."""

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
from phalanx.rpc.autograd.container import graph
from tests.ranks import RankServer
from tests.rpc_training import (
    LIMIT,
    batches,
    dense,
    made_parameter,
    make,
    table,
    wait_until_free,
    worker,
)


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Imported once, not by each rank: what the step of an optimizer imports too."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


# ---- two trainers, a master that drives them, a server ----


def hybrid(wrapper: str) -> None:
    with worker() as rank:
        group = dist.new_group([0, 1])
        GROUPS[:] = [group]
        dist.barrier()
        if rank == 3:
            bags = RemoteModule("w2", table, (1,))
            futures = [
                rpc.rpc_async(f"w{trainer}", train, (bags, wrapper, trainer)) for trainer in (0, 1)
            ]
            losses = [future.wait() for future in futures]
            (weight,) = (reference.to_here() for reference in bags.remote_parameters())
            assert rpc.rpc_sync("w2", none_in_grad, (bags.get_module_rref(),))
            check_hybrid(losses, weight.detach())
            del weight
            wait_until_free([0, 1, 2, 3])
        dist.barrier()


GROUPS: list[Any] = []


def none_in_grad(module: RRef[nn.Module]) -> bool:
    return all(parameter.grad is None for parameter in module.local_value().parameters())


def train(bags: RemoteModule, wrapper: str, rank: int) -> list[float]:
    (group,) = GROUPS
    local = dense(2)
    if wrapper == "DDP":
        model: nn.Module = DistributedDataParallel(local, process_group=group)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    else:
        model = SharedDataParallel(local, group=group)
        own = model.optimizer(torch.optim.SGD, lr=0.5)
    remote = DistributedOptimizer(torch.optim.SGD, bags.remote_parameters(), lr=0.5)
    losses = []
    for rows, labels in batches(rank):
        loss = cross_entropy(model(bags(rows)), labels)
        own.zero_grad()
        remote.zero_grad()
        loss.backward()
        # In step: all have looked up before the first updates, and all have updated after that.
        dist.barrier(group)
        own.step()
        remote.step()
        dist.barrier(group)
        losses.append(loss.item())
    return losses


def check_hybrid(losses: list[list[float]], weight: Tensor) -> None:
    bags, model = table(1), dense(2)
    optimizer = torch.optim.SGD([*bags.parameters(), *model.parameters()], lr=0.5)
    for step, both in enumerate(zip(batches(0), batches(1), strict=True)):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rank, (rows, labels) in enumerate(both):
            loss = cross_entropy(model(bags(rows)), labels)
            assert losses[rank][step] == pytest.approx(loss.item(), rel=1e-12)
            total = total + loss
        total.backward()
        # Data parallelism averages; each trainer's own step of the table adds to the other's.
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        optimizer.step()
    torch.testing.assert_close(weight, bags.weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrapper", ["DDP", "SharedDataParallel"])
def test_hybrid_losses_equal_one_process(ranks: RankServer, wrapper: str) -> None:
    ranks.run(4, hybrid, wrapper)


# ---- graphs over several workers ----


class Tower(nn.Module):
    """On worker 1, with a part on worker 2, which asks worker 0 for the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make(3)
        self.rest = RemoteModule("w2", Middle)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        return self.rest(hidden) + hidden + inputs


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle = make(4)

    def forward(self, inputs: Tensor) -> Tensor:
        return rpc.rpc_sync("w0", last, (self.middle(inputs),)) * inputs


LAST: list[nn.Module] = []


def last(inputs: Tensor) -> Tensor:
    return LAST[0](inputs).tanh()


def nested() -> None:
    with worker() as rank:
        LAST[:] = [make(5)]
        dist.barrier()
        if rank == 0:
            check_nested()
            check_references()
            check_modes()
            wait_until_free([0, 1, 2])
        dist.barrier()


def check_nested() -> None:
    tower = RemoteModule("w1", Tower)
    parts = [make(seed) for seed in (3, 4, 5)]
    first, middle, end = parts
    start = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    copied = start.detach().clone().requires_grad_()

    def alone(inputs: Tensor) -> Tensor:
        hidden = first(inputs).tanh()
        return end(middle(hidden)).tanh() * hidden + hidden + inputs

    # The same module twice, and the input besides: gradients meet in several places.
    (tower(tower(start.sin()) * start).square().sum() + start.exp().sum()).backward()
    (alone(alone(copied.sin()) * copied).square().sum() + copied.exp().sum()).backward()
    torch.testing.assert_close(start.grad, copied.grad)
    near(dict(LAST[0].named_parameters()), end)
    near(rpc.rpc_sync("w1", kept, (tower.get_module_rref(), "first", 0)), first)
    near(rpc.rpc_sync("w1", kept_below, (tower.get_module_rref(), 0)), middle)


def kept(module: RRef[nn.Module], part: str, root: int) -> dict[str, Tensor | None]:
    """The gradients of a part that are kept for a worker."""
    seen = graph().gradients.peek(graph().root._replace(worker=root))
    named = getattr(module.local_value(), part).named_parameters()
    return {name: seen.get(parameter) for name, parameter in named}


def kept_below(tower: RRef[Any], root: int) -> dict[str, Tensor | None]:
    below = tower.local_value().rest.get_module_rref()
    found: dict[str, Tensor | None] = rpc.rpc_sync("w2", kept, (below, "middle", root))
    return found


def near(found: dict[str, Any], oracle: nn.Module) -> None:
    for name, parameter in oracle.named_parameters():
        own = found[name]
        gradient = own.grad if isinstance(own, nn.Parameter) else own
        torch.testing.assert_close(gradient, parameter.grad)


def check_references() -> None:
    """Values that stay on a worker, with their graphs, and parameters that are fetched."""
    start = torch.randn(4, dtype=torch.float64, requires_grad=True)
    weight = rpc.remote("w1", made_parameter)
    product = rpc.remote("w1", product_of, (start * 2, weight))
    further = rpc.remote("w2", product_of, (start, product))
    loss = (further.to_here() * weight.to_here() + product.to_here()).sum()
    loss.backward()
    copied, other = start.detach().clone().requires_grad_(), made_parameter()
    (copied * (copied * 2 * other) * other + copied * 2 * other).sum().backward()
    torch.testing.assert_close(start.grad, copied.grad)
    found = rpc.rpc_sync("w1", gradient_of, (weight, 0))
    torch.testing.assert_close(found, other.grad)


def product_of(inputs: Tensor, weight: RRef[Tensor]) -> Tensor:
    return inputs * weight.to_here()


def gradient_of(parameter: RRef[Tensor], root: int) -> Tensor | None:
    seen = graph().gradients.peek(graph().root._replace(worker=root))
    return seen.get(parameter.local_value())


def check_modes() -> None:
    """Without gradients here, there are none there, and what comes needs none."""
    module = RemoteModule("w1", make, (3,))
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


def test_a_graph_over_three_workers(ranks: RankServer) -> None:
    ranks.run(3, nested)


# ---- several trainers of the same parameters ----


def concurrent_trainers() -> None:
    with worker() as rank:
        dist.barrier()
        module = RRef(make(3)) if rank == 0 else None
        shared = [module]
        if rank == 0:
            futures = [rpc.rpc_async(f"w{one}", apart, (module, one)) for one in (1, 2, 3)]
            gradients = [future.wait() for future in futures]
            assert module is not None
            check_apart(module, gradients)
            check_server_steps(module)
        del shared
        dist.barrier()


def apart(module: RRef[nn.Module], rank: int) -> Tensor:
    """Gradients of many passes, while others make theirs; then a step of worker 1 alone."""
    remote = RemoteModule.init_from_module_rref("w0", module)
    inputs = torch.full((2, 4), float(rank), dtype=torch.float64, requires_grad=True)
    for _ in range(20):
        remote(inputs).sum().backward()
    result = remote(inputs)
    optimizer = DistributedOptimizer(torch.optim.SGD, remote.remote_parameters(), lr=1.0)
    if rank == 1:
        optimizer.step()
        result.sum().backward()  # what it was calculated from has changed since
        optimizer.zero_grad()
    assert inputs.grad is not None
    return inputs.grad


def check_apart(module: RRef[nn.Module], gradients: list[Tensor]) -> None:
    own = module.local_value()
    assert isinstance(own, nn.Linear)
    for rank, gradient in enumerate(gradients, 1):
        assert gradient.shape == (2, 4)
        seen = graph().gradients.peek(graph().root._replace(worker=rank))
        if rank == 1:
            assert not seen
        else:
            torch.testing.assert_close(seen[own.weight], torch.full_like(own.weight, 40.0 * rank))
    torch.testing.assert_close(own.bias.detach(), make(3).bias.detach() - 40.0)
    assert own.weight.grad is None


def check_server_steps(module: RRef[nn.Module]) -> None:
    """Asked to, it adds up the gradients of all."""
    own = module.local_value()
    assert isinstance(own, nn.Linear)
    dist_autograd.mix_gradients(own.parameters())
    for one in (1, 2, 3):
        rpc.rpc_sync(f"w{one}", once, (module, one))
    assert own.weight.grad is not None
    torch.testing.assert_close(own.weight.grad, torch.full_like(own.weight, 12.0))
    dist_autograd.mix_gradients(own.parameters(), mixed=False)


def once(module: RRef[nn.Module], rank: int) -> None:
    inputs = torch.full((2, 4), float(rank), dtype=torch.float64)
    module.rpc_sync().forward(inputs).sum().backward()


def test_gradients_of_several_trainers_stay_apart(ranks: RankServer) -> None:
    ranks.run(4, concurrent_trainers)


# ---- death ----


def with_a_death() -> str:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}")
    if rank == 1:
        module = RemoteModule("w0", make, (3,))
        module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        result = module(torch.ones(1, 4, dtype=torch.float64))  # of which worker 0 keeps the graph
        dist.barrier()
        dist.barrier()
        assert result.requires_grad
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        victim = RemoteModule("w1", make, (3,))
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
        go_back_until_lost(result.sum())
    with pytest.raises(PeerLost, match="'w1'"):
        optimizer.step()
    rpc.shutdown(graceful=False)
    return str(first.value)


def go_back_until_lost(loss: Tensor) -> None:
    """The kill takes its time; the ranks' own limit ends this if it never comes."""
    while True:
        loss.backward(retain_graph=True)


def test_a_death_is_named_and_frees(ranks: RankServer) -> None:
    ended = ranks.start(3, with_a_death).join()
    assert ended[1].code == -signal.SIGKILL
    assert ended[0].value == ""
    assert "'w1'" in ended[2].value
