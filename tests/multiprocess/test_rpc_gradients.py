"""Gradients through calls over real processes: of sparse tensors, in containers, in contexts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import rpc
from phalanx.errors import UsageError
from phalanx.rpc import DistributedOptimizer
from phalanx.rpc import autograd as dist_autograd
from tests.ranks import RankServer
from tests.rpc_training import wait_until_free, worker


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Imported once, not by each rank: what the step of an optimizer imports too."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


# ---- the reported case: one gradient for two parameters ----

SERVED = {name: nn.Parameter(torch.ones(3)) for name in "pq"}


def served(name: str) -> Any:
    return rpc.RRef(SERVED[name])


def add(x: Tensor) -> Tensor:
    return SERVED["p"] + SERVED["q"] + x


def add_all(x: Tensor) -> Tensor:
    return SERVED["p"].sum() + SERVED["q"].sum() + x


def values() -> list[list[float]]:
    return [parameter.tolist() for parameter in SERVED.values()]


def reset() -> None:
    for parameter in SERVED.values():
        nn.init.ones_(parameter)


class InPlaceSGD(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-0.5, 0.5).mul_(0.5)
        super().step(closure)


def in_place() -> None:
    with worker() as rank:
        if rank == 0:
            parameters = [rpc.rpc_sync("w1", served, (name,)) for name in SERVED]
            optimizer = DistributedOptimizer(InPlaceSGD, parameters, lr=1.0)
            for function in (add, add_all):
                rpc.rpc_sync("w1", function, (torch.zeros(3),)).sum().backward()
                optimizer.step()
                assert rpc.rpc_sync("w1", values) == [[0.75] * 3] * 2
                rpc.rpc_sync("w1", reset)
        dist.barrier()


def test_optimizers_that_change_gradients_in_place(ranks: RankServer) -> None:
    ranks.run(2, in_place)


# ---- sparse tensors ----

LAYOUTS = {
    "coo": lambda dense: dense.to_sparse(),
    "hybrid": lambda dense: dense.to_sparse(1),
    "uncoalesced": lambda dense: dense.to_sparse() + (dense * 2).to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
}


def dense_parameter() -> Tensor:
    values = torch.tensor([[0.0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 0, 4], [0, 5, 6, 0]])
    return values.double().requires_grad_()


def scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor


def as_dense(tensor: Tensor) -> Tensor:
    dense: Tensor = tensor.to_dense()
    return dense


def sparse() -> None:
    with worker() as rank:
        if rank == 0:
            for to in ("w1", "w0"):  # the second is this worker itself
                for name, make in LAYOUTS.items():
                    check_layout(to, name, make)
                check_leaf(to)
            with torch.no_grad():
                assert not rpc.rpc_sync(
                    "w1", torch.add, (dense_parameter().to_sparse(),) * 2
                ).requires_grad
            with pytest.raises(UsageError, match=r"quint8|float8|couldn't find the way back"):
                rpc.rpc_sync("w1", scaled, (lossy(), 1.0))
            wait_until_free([0, 1])
        dist.barrier()


def lossy() -> Tensor:
    """A tensor of the graph whose dtype doesn't travel as a tensor."""
    return dense_parameter().to(torch.float8_e4m3fn)


def check_layout(to: str, name: str, make: Callable[[Tensor], Tensor]) -> None:
    here, alone = dense_parameter(), dense_parameter()
    sent = make(here)
    there = rpc.rpc_sync(to, scaled, (sent, 3.0))
    assert there.requires_grad, (to, name)
    assert (there.layout, there.shape) == (sent.layout, sent.shape)
    result = rpc.rpc_sync(to, as_dense, (there * 2,))
    result.square().sum().backward()
    (make(alone) * 6.0).to_dense().square().sum().backward()
    torch.testing.assert_close(here.grad, alone.grad, msg=f"{name} to {to}")


def check_leaf(to: str) -> None:
    here = dense_parameter().detach().to_sparse().requires_grad_()
    alone = here.detach().clone().requires_grad_()
    torch.sparse.sum(rpc.rpc_sync(to, torch.add, (here, here))).backward()
    torch.sparse.sum(torch.add(alone, alone)).backward()
    assert here.grad is not None
    assert alone.grad is not None
    torch.testing.assert_close(here.grad.to_dense(), alone.grad.to_dense())
    with dist_autograd.context() as context_id:
        loss = torch.sparse.sum(rpc.rpc_sync(to, torch.add, (here, here)))
        dist_autograd.backward(context_id, [loss])
        (gradient,) = dist_autograd.get_gradients(context_id).values()
        torch.testing.assert_close(gradient.to_dense(), alone.grad.to_dense())


def test_sparse_tensors_keep_their_history(ranks: RankServer) -> None:
    ranks.run(2, sparse)


# ---- parameters in lists, dicts and keyword arguments ----


def product(pair: list[Tensor], *, more: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    return {"results": [pair[0] * pair[1] * more["scale"]]}


def containers() -> None:
    with worker() as rank:
        if rank == 0:
            given = [nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(3)]
            alone = [each.detach().clone().requires_grad_() for each in given]
            for to in ("w1", "w0"):
                found = rpc.rpc_sync(to, product, (given[:2],), {"more": {"scale": given[2]}})
                found["results"][0].sum().backward()
                product(alone[:2], more={"scale": alone[2]})["results"][0].sum().backward()
            for here, oracle in zip(given, alone, strict=True):
                torch.testing.assert_close(here.grad, oracle.grad)
            (cyclic,) = cycle = [given[0]]
            cycle.append(cycle)
            come = rpc.rpc_sync("w1", same, (cycle, cyclic))
            assert come[1] is come
            assert rpc.rpc_sync("w1", same, ([given, given],))[0] is not given
            found = rpc.rpc_sync("w1", same, ({"a": given, "b": given},))
            assert found["a"] is found["b"]
            with torch.no_grad():
                assert type(rpc.rpc_sync("w1", same, (given,))[0]) is nn.Parameter
            del come, found, cycle
            wait_until_free([0, 1])
        dist.barrier()


def same(value: Any, *_: object) -> Any:
    return value


def test_parameters_in_containers_get_gradients(ranks: RankServer) -> None:
    ranks.run(2, containers)


# ---- contexts ----


def look_up(context_id: Any) -> int:
    return len(dist_autograd.get_gradients(context_id))


def step_in(context_id: int) -> None:
    DistributedOptimizer(torch.optim.SGD, [nn.Parameter(torch.ones(1))], lr=1.0).step(context_id)


def backward_in(context_id: int) -> None:
    dist_autograd.backward(context_id, [torch.ones(1, requires_grad=True).sum()])


def contexts() -> None:
    with worker() as rank:
        with dist_autograd.context() as mine:
            for to in ("w0", "w1", "w2"):
                assert rpc.rpc_sync(to, look_up, (mine,)) == 0
                rpc.rpc_sync(to, step_in, (mine,))
        unknown = [
            mine,
            mine + 1,
            77 << 48 | 1,
            (rank + 1) % 3 << 48 | 5,
            -1,
            2**80,
            None,
            "1",
            1.0,
        ]
        for number in unknown:
            for function in (look_up, step_in, backward_in):
                for to in (f"w{rank}", f"w{(rank + 1) % 3}"):
                    if number is None and function is step_in:
                        continue  # the context of the thread, if any
                    words = "Could not find autograd context with id"
                    if function is backward_in and not isinstance(number, int):
                        words = "incompatible function arguments"
                    with pytest.raises(UsageError, match=words):
                        rpc.rpc_sync(to, function, (number,))
        dist.barrier()


def test_an_unknown_context_is_an_error_on_every_worker(ranks: RankServer) -> None:
    ranks.run(3, contexts)


# ---- threads of one worker ----

THREADS, PASSES = 4, 10


def scale_later(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor


def threads() -> None:
    with worker() as rank:
        if rank == 0:
            weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
            weight.grad = torch.full((3,), 7.0, dtype=torch.float64)
            wrong: list[object] = []
            together = threading.Barrier(THREADS)

            def train(number: int) -> None:
                for _ in range(PASSES):
                    together.wait(60)
                    with dist_autograd.context() as context_id:
                        loss = rpc.rpc_sync("w1", scale_later, (weight * 2, float(number))).sum()
                        dist_autograd.backward(context_id, [loss])
                        found = dist_autograd.get_gradients(context_id)
                    if found.keys() != {weight} or found[weight].tolist() != [2.0 * number] * 3:
                        wrong.append((number, found))

            running = [
                threading.Thread(target=train, args=(each,)) for each in range(1, THREADS + 1)
            ]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join(60)
            assert not wrong
            assert weight.grad.tolist() == [7.0] * 3
        dist.barrier()


def test_contexts_keep_the_gradients_of_threads_apart(ranks: RankServer) -> None:
    ranks.run(2, threads)
