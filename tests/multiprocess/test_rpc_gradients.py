"""Gradients through calls between processes: sparse tensors, containers and contexts."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

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
    """Import slow modules once, not in each rank."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


# ---- one gradient for two parameters ----

PARAMETERS = {name: nn.Parameter(torch.ones(3)) for name in "pq"}


def get_parameter(name: str) -> Any:
    return rpc.RRef(PARAMETERS[name])


def add(x: Tensor) -> Tensor:
    return PARAMETERS["p"] + PARAMETERS["q"] + x


def add_all(x: Tensor) -> Tensor:
    return PARAMETERS["p"].sum() + PARAMETERS["q"].sum() + x


def get_values() -> list[list[float]]:
    return [parameter.tolist() for parameter in PARAMETERS.values()]


def reset() -> None:
    for parameter in PARAMETERS.values():
        nn.init.ones_(parameter)


class InPlaceSGD(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-0.5, 0.5).mul_(0.5)
        super().step(closure)


def check_in_place() -> None:
    with worker() as rank:
        if rank == 0:
            parameters = [rpc.rpc_sync("w1", get_parameter, (name,)) for name in PARAMETERS]
            optimizer = DistributedOptimizer(InPlaceSGD, parameters, lr=1.0)
            for function in (add, add_all):
                rpc.rpc_sync("w1", function, (torch.zeros(3),)).sum().backward()
                optimizer.step()
                assert rpc.rpc_sync("w1", get_values) == [[0.75] * 3] * 2
                rpc.rpc_sync("w1", reset)
        dist.barrier()


def test_optimizers_that_change_gradients_in_place(ranks: RankServer) -> None:
    ranks.run(2, check_in_place)


# ---- sparse tensors ----

LAYOUTS = {
    "coo": lambda dense: dense.to_sparse(),
    "hybrid": lambda dense: dense.to_sparse(1),
    "uncoalesced": lambda dense: dense.to_sparse() + (dense * 2).to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
}


def make_dense_parameter() -> Tensor:
    values = torch.tensor([[0.0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 0, 4], [0, 5, 6, 0]])
    return values.double().requires_grad_()


def scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor


def as_dense(tensor: Tensor) -> Tensor:
    dense: Tensor = tensor.to_dense()
    return dense


def check_sparse() -> None:
    with worker() as rank:
        if rank == 0:
            for to in ("w1", "w0"):  # the second is this worker
                for name, make in LAYOUTS.items():
                    check_layout(to, name, make)
                check_leaf(to)
            with torch.no_grad():
                assert not rpc.rpc_sync(
                    "w1", torch.add, (make_dense_parameter().to_sparse(),) * 2
                ).requires_grad
            with pytest.raises(UsageError, match=r"torch\._mkldnn.*autograd cannot follow it"):
                rpc.rpc_sync("w1", scaled, (make_mkldnn_tensor(), 1.0))
            wait_until_free([0, 1])
        dist.barrier()


def make_mkldnn_tensor() -> Tensor:
    """Return a tensor with history whose layout is not sent as a tensor."""
    return make_dense_parameter().float().to_mkldnn()


def check_layout(to: str, name: str, make: Callable[[Tensor], Tensor]) -> None:
    parameter, oracle = make_dense_parameter(), make_dense_parameter()
    sent = make(parameter)
    scaled_there = rpc.rpc_sync(to, scaled, (sent, 3.0))
    assert scaled_there.requires_grad, (to, name)
    assert (scaled_there.layout, scaled_there.shape) == (sent.layout, sent.shape)
    result = rpc.rpc_sync(to, as_dense, (scaled_there * 2,))
    result.square().sum().backward()
    (make(oracle) * 6.0).to_dense().square().sum().backward()
    torch.testing.assert_close(parameter.grad, oracle.grad, msg=f"{name} to {to}")


def check_leaf(to: str) -> None:
    parameter = make_dense_parameter().detach().to_sparse().requires_grad_()
    oracle = parameter.detach().clone().requires_grad_()
    torch.sparse.sum(rpc.rpc_sync(to, torch.add, (parameter, parameter))).backward()
    torch.sparse.sum(torch.add(oracle, oracle)).backward()
    assert parameter.grad is not None
    assert oracle.grad is not None
    torch.testing.assert_close(parameter.grad.to_dense(), oracle.grad.to_dense())
    with dist_autograd.context() as context_id:
        loss = torch.sparse.sum(rpc.rpc_sync(to, torch.add, (parameter, parameter)))
        dist_autograd.backward(context_id, [loss])
        (gradient,) = dist_autograd.get_gradients(context_id).values()
        torch.testing.assert_close(gradient.to_dense(), oracle.grad.to_dense())


def test_sparse_tensors_keep_their_history(ranks: RankServer) -> None:
    ranks.run(2, check_sparse)


# ---- parameters in lists, dicts and keyword arguments ----


def multiply(pair: list[Tensor], *, more: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    return {"results": [pair[0] * pair[1] * more["scale"]]}


def check_containers() -> None:
    with worker() as rank:
        if rank == 0:
            parameters = [nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(3)]
            oracles = [each.detach().clone().requires_grad_() for each in parameters]
            for to in ("w1", "w0"):
                found = rpc.rpc_sync(
                    to, multiply, (parameters[:2],), {"more": {"scale": parameters[2]}}
                )
                found["results"][0].sum().backward()
                multiply(oracles[:2], more={"scale": oracles[2]})["results"][0].sum().backward()
            for parameter, oracle in zip(parameters, oracles, strict=True):
                torch.testing.assert_close(parameter.grad, oracle.grad)
            (cyclic,) = cycle = [parameters[0]]
            cycle.append(cycle)
            received = rpc.rpc_sync("w1", echo, (cycle, cyclic))
            assert received[1] is received
            assert rpc.rpc_sync("w1", echo, ([parameters, parameters],))[0] is not parameters
            found = rpc.rpc_sync("w1", echo, ({"a": parameters, "b": parameters},))
            assert found["a"] is found["b"]
            with torch.no_grad():
                assert type(rpc.rpc_sync("w1", echo, (parameters,))[0]) is nn.Parameter
            del received, found, cycle
            wait_until_free([0, 1])
        dist.barrier()


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass(frozen=True)
class Weights:
    weight: Tensor
    others: Any = ()


class Model(nn.Module):
    """A module with another reference to its parameters, as nn.LSTM has it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1, dtype=torch.float64)
        self.alias = [self.linear.weight]


def put_into(kind: str, weight: Tensor) -> Any:
    return {
        "OrderedDict": lambda: OrderedDict(weight=weight),
        "defaultdict": lambda: defaultdict(list, weight=[weight]),
        "deque": lambda: deque([weight]),
        "set": lambda: {weight},
        "namedtuple": lambda: Pair(weight, [1]),
        "dataclass": lambda: Weights(weight, {"more": (weight,)}),
        "SimpleNamespace": lambda: SimpleNamespace(weight=weight),
        "nested": lambda: [OrderedDict(pair=Pair(torch.ones(1), Weights(weight)))],
    }[kind]()


def find_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return find_tensors(list(value.values()))
    if isinstance(value, (Weights, SimpleNamespace)):
        return find_tensors(vars(value))
    if isinstance(value, (list, tuple, set, deque)):
        return [tensor for each in value for tensor in find_tensors(each)]
    return []


def sum_of(container: Any) -> Tensor:
    return torch.stack([each.double().sum() for each in find_tensors(container)]).sum()


def is_whole(model: Model, optimizer: torch.optim.Optimizer) -> list[bool]:
    (group,) = optimizer.param_groups
    return [
        isinstance(model.linear.weight, nn.Parameter),
        model.alias[0] is model.linear.weight,
        group["params"][0] is model.linear.weight,
    ]


def check_other_containers(kind: str) -> None:
    with worker() as rank:
        if rank == 0:
            weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
            rpc.rpc_sync("w1", sum_of, (put_into(kind, weight),)).backward()
            count = sum(each is weight for each in find_tensors(put_into(kind, weight)))
            assert weight.grad is not None
            assert weight.grad.tolist() == [float(count)] * 4
            model = Model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            assert rpc.rpc_sync("w1", is_whole, (model, optimizer)) == [True] * 3
            with pytest.raises(UsageError, match="a parameter of a Model is sent beside it"):
                rpc.rpc_sync("w1", echo, (Weights(model.linear.weight, model),))
            wait_until_free([0, 1])
        dist.barrier()


CONTAINERS = ("OrderedDict", "defaultdict", "deque", "set", "namedtuple", "dataclass")


@pytest.mark.parametrize("kind", (*CONTAINERS, "SimpleNamespace", "nested"))
def test_parameters_in_any_container_get_gradients(ranks: RankServer, kind: str) -> None:
    ranks.run(2, check_other_containers, kind)


def echo(value: Any, *_: object) -> Any:
    return value


def test_parameters_in_containers_get_gradients(ranks: RankServer) -> None:
    ranks.run(2, check_containers)


# ---- contexts ----


def count_gradients(context_id: Any) -> int:
    return len(dist_autograd.get_gradients(context_id))


def step_in_context(context_id: int) -> None:
    DistributedOptimizer(torch.optim.SGD, [nn.Parameter(torch.ones(1))], lr=1.0).step(context_id)


def backward_in_context(context_id: int) -> None:
    dist_autograd.backward(context_id, [torch.ones(1, requires_grad=True).sum()])


def check_contexts() -> None:
    with worker() as rank:
        with dist_autograd.context() as own_context:
            for to in ("w0", "w1", "w2"):
                assert rpc.rpc_sync(to, count_gradients, (own_context,)) == 0
                rpc.rpc_sync(to, step_in_context, (own_context,))
        unknown = [
            own_context,
            own_context + 1,
            77 << 48 | 1,
            (rank + 1) % 3 << 48 | 5,
            -1,
            2**80,
            None,
            "1",
            1.0,
        ]
        for number in unknown:
            for function in (count_gradients, step_in_context, backward_in_context):
                for to in (f"w{rank}", f"w{(rank + 1) % 3}"):
                    if number is None and function is step_in_context:
                        continue  # None means the context of the thread, if any
                    message = "Could not find autograd context with id"
                    if function is backward_in_context and not isinstance(number, int):
                        message = "incompatible function arguments"
                    with pytest.raises(UsageError, match=message):
                        rpc.rpc_sync(to, function, (number,))
        dist.barrier()


def test_unknown_context_is_an_error_on_every_worker(ranks: RankServer) -> None:
    ranks.run(3, check_contexts)


# ---- threads of one worker ----

THREADS, PASSES = 4, 10


def scale_later(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor


def check_threads() -> None:
    with worker() as rank:
        if rank == 0:
            weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
            weight.grad = torch.full((3,), 7.0, dtype=torch.float64)
            failures: list[object] = []
            barrier = threading.Barrier(THREADS)

            def train(number: int) -> None:
                for _ in range(PASSES):
                    barrier.wait(60)
                    with dist_autograd.context() as context_id:
                        loss = rpc.rpc_sync("w1", scale_later, (weight * 2, float(number))).sum()
                        dist_autograd.backward(context_id, [loss])
                        found = dist_autograd.get_gradients(context_id)
                    if found.keys() != {weight} or found[weight].tolist() != [2.0 * number] * 3:
                        failures.append((number, found))

            running = [
                threading.Thread(target=train, args=(each,)) for each in range(1, THREADS + 1)
            ]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join(60)
            assert not failures
            assert weight.grad.tolist() == [7.0] * 3
        dist.barrier()


def test_contexts_separate_the_gradients_of_threads(ranks: RankServer) -> None:
    ranks.run(2, check_threads)
