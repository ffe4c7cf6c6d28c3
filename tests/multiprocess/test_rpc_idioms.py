"""Idioms of programs for PyTorch's RPC, unchanged except for the import."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from phalanx import rpc
from phalanx.errors import UsageError
from phalanx.rpc import DistributedOptimizer, RemoteModule, RRef, remote, rpc_async, rpc_sync
from phalanx.rpc import autograd as dist_autograd
from tests.ranks import RankServer

ROWS, WIDTH, OUT = 20, 6, 3
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


# ---- calls of methods, as in the tutorials ----


def call_method(method: Callable[..., Any], rref: RRef[Any], *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method: Callable[..., Any], rref: RRef[Any], *args: Any, **kwargs: Any) -> Any:
    return rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


def parameter_rrefs(module: nn.Module) -> list[RRef[Tensor]]:
    return [RRef(parameter) for parameter in module.parameters()]


def linear(seed: int, inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- a server that steps when all gradients have arrived ----


class BatchServer:
    def __init__(self, size: int) -> None:
        self.model, self.size, self.count = linear(0, WIDTH, OUT), size, 0
        self.lock = threading.Lock()
        self.future_model: torch.futures.Future[nn.Module] = torch.futures.Future()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self) -> nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(rref: RRef[Any], gradients: list[Tensor]) -> Any:
        self = rref.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient
            self.count += 1
            future = self.future_model
            if self.count == self.size:
                for parameter in self.model.parameters():
                    parameter.grad /= self.size
                self.count = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                future.set_result(self.model)
                self.future_model = torch.futures.Future()
        return future


def train_in_batches(server: RRef[BatchServer], trainer: int) -> list[float]:
    model, losses = server.rpc_sync().get_model(), []
    for step in range(STEPS):
        loss = model(draw(10 * step + trainer, 4, WIDTH)).square().mean()
        loss.backward()
        losses.append(loss.item())
        model = rpc_sync(
            server.owner(),
            BatchServer.update_and_fetch,
            args=(server, [parameter.grad for parameter in model.parameters()]),
        )
    return losses


def check_batches() -> None:
    server = RRef(BatchServer(2))
    futures = [rpc_async(f"trainer{each}", train_in_batches, (server, each)) for each in (0, 1)]
    losses = torch.futures.wait_all(futures)
    model = linear(0, WIDTH, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        expected = [model(draw(10 * step + each, 4, WIDTH)).square().mean() for each in (0, 1)]
        assert [each.item() for each in expected] == pytest.approx([each[step] for each in losses])
        optimizer.zero_grad()
        (sum(expected) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()


# ---- an agent that answers all observers together ----


class Agent:
    def __init__(self, observers: int) -> None:
        self.rref, self.states = RRef(self), torch.zeros(observers)
        self.future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.lock, self.pending = threading.Lock(), observers

    @staticmethod
    @rpc.functions.async_execution
    def select(rref: RRef[Any], observer: int, state: Tensor) -> Any:
        self = rref.local_value()
        self.states[observer].copy_(state)
        action = self.future.then(lambda actions: actions.wait()[observer].item())
        with self.lock:
            self.pending -= 1
            if not self.pending:
                self.pending = len(self.states)
                future, self.future = self.future, torch.futures.Future()
                future.set_result(self.states * 2)
        return action


class Observer:
    def __init__(self) -> None:
        self.id, self.select = rpc.get_worker_info().id, Agent.select

    def run(self, agent: RRef[Agent], steps: int) -> list[float]:
        return [
            rpc_sync(agent.owner(), self.select, args=(agent, self.id, torch.tensor(float(step))))
            for step in range(steps)
        ]


def check_agent() -> None:
    agent = Agent(2)
    observers = [remote(rpc.get_worker_info(f"trainer{each}"), Observer) for each in (0, 1)]
    futures = [observer.rpc_async().run(agent.rref, 5) for observer in observers]
    assert torch.futures.wait_all(futures) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2
    futures = [
        rpc_async(each.owner(), call_method, args=(Observer.run, each, agent.rref, 2))
        for each in observers
    ]
    assert [future.wait() for future in futures] == [[0.0, 2.0]] * 2


# ---- a model in two parts on two workers, in micro-batches ----


class Stage(nn.Module):
    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self._lock, self.layer = threading.Lock(), linear(seed, inputs, outputs)

    def forward(self, rref: RRef[Tensor]) -> Tensor:
        inputs = rref.to_here()
        with self._lock:
            return self.layer(inputs).tanh()

    def parameter_rrefs(self) -> list[RRef[Tensor]]:
        return [RRef(parameter) for parameter in self.parameters()]


def make_optimizer(rrefs: list[RRef[nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([rref.to_here() for rref in rrefs], lr=0.1)


def check_pipeline() -> None:
    stages = remote("trainer0", Stage, args=(1, WIDTH, 5)), remote("trainer1", Stage, (2, 5, OUT))
    rrefs = [stage.remote().parameter_rrefs().to_here() for stage in stages]
    optimizer = DistributedOptimizer(torch.optim.SGD, [*rrefs[0], *rrefs[1]], lr=0.1)
    reference = nn.Sequential(linear(1, WIDTH, 5), nn.Tanh(), linear(2, 5, OUT), nn.Tanh())
    oracle = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizers = [
        remote(stage.owner(), make_optimizer, args=(parameters,))
        for stage, parameters in zip(stages, rrefs, strict=True)
    ]
    for step in range(STEPS):
        inputs = draw(step, 8, WIDTH)
        with dist_autograd.context() as context_id:
            futures = []
            for micro in iter(inputs.split(2, dim=0)):
                middle = stages[0].remote().forward(RRef(micro))
                futures.append(stages[1].rpc_async().forward(middle))
            loss = torch.cat(torch.futures.wait_all(futures)).square().mean()
            dist_autograd.backward(context_id, [loss])
            # Ordinary optimizers on the owners find no gradients: these are in the context.
            for each in optimizers:
                each.rpc_sync().step()
                each.rpc_sync().zero_grad()
            optimizer.step(context_id)
        oracle.zero_grad()
        expected = reference(inputs).square().mean()
        expected.backward()
        oracle.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


# ---- embeddings on a server, DDP on trainers, controlled by a master ----


class Hybrid(nn.Module):
    def __init__(self, bags: RemoteModule, rank: int) -> None:
        super().__init__()
        self.bags, self.rank = bags, rank
        self.dense = DistributedDataParallel(linear(3, WIDTH, OUT))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        output: Tensor = self.dense(self.bags.forward(indices, offsets))
        return output


def make_bag(seed: int) -> nn.EmbeddingBag:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(ROWS, WIDTH, mode="sum", dtype=torch.float64)


def make_batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    indices = torch.randint(ROWS, (9,), generator=generator)
    return indices, torch.tensor([0, 2, 7]), draw(step, 3, OUT)


class Gradients:
    """Access to the server's gradients of a context of another worker."""

    @staticmethod
    def get(context_id: int) -> dict[Tensor, Tensor]:
        return dist_autograd.get_gradients(context_id)


def train_hybrid(bags: RemoteModule, rank: int) -> tuple[list[float], list[Tensor]]:
    model = Hybrid(bags, rank)
    rrefs = [RRef(parameter) for parameter in model.dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    losses, gradients = [], []
    for step in range(STEPS):
        with dist_autograd.context() as context_id:
            indices, offsets, target = make_batch(step, rank)
            loss = mse_loss(model(indices, offsets), target)
            dist_autograd.backward(context_id, [loss])
            ((weight, gradient),) = rpc_sync("ps", Gradients.get, (context_id,)).items()
            assert weight.shape == gradient.shape
            gradients.append(gradient)
            optimizer.step(context_id)
            losses.append(loss.item())
    return losses, gradients


def check_hybrid() -> None:
    bags = RemoteModule("ps", make_bag, args=(5,))
    futures = [rpc_async(f"trainer{each}", train_hybrid, args=(bags, each)) for each in (0, 1)]
    results = [future.wait() for future in futures]
    bag, dense = make_bag(5), linear(3, WIDTH, OUT)
    for step in range(STEPS):
        dense.zero_grad()
        for rank, (losses, gradients) in enumerate(results):
            bag.zero_grad()
            indices, offsets, target = make_batch(step, rank)
            loss = mse_loss(dense(bag(indices, offsets)), target)
            loss.backward()
            assert losses[step] == pytest.approx(loss.item(), rel=1e-12)
            torch.testing.assert_close(gradients[step], bag.weight.grad)
        with torch.no_grad():
            for parameter in dense.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad / 2)


# ---- scripts and references ----


def scale(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def get_weight(rref: RRef[nn.Linear]) -> Tensor:
    return rref.local_value().weight


def check_script() -> None:
    x = torch.ones(3, requires_grad=True)
    y = rpc_sync("ps", torch.jit.script(scale), args=(x,), kwargs={"factor": 3.0})
    y.sum().backward()
    assert x.grad is not None
    assert (y.tolist(), x.grad.tolist()) == ([3.0] * 3, [3.0] * 3)
    assert torch.equal(rpc_async("ps", torch.jit.script(Doubling()), (y,)).wait(), 2 * y)
    module = remote("ps", torch.jit.script, (Doubling(),))
    assert torch.equal(module.rpc_sync().forward(y), 2 * y)


def check_references() -> None:
    layer = remote("ps", linear, args=(7, 2, 1))
    reference = linear(7, 2, 1)
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    loss = layer.remote().forward(x)
    reference(x).sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    loss.backward()
    assert torch.equal(x.grad, expected)
    with dist_autograd.context() as context_id:
        layer.remote().forward(x).backward(context_id)
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], expected)
        (remote_gradient,) = [
            each
            for each in rpc_sync("ps", Gradients.get, (context_id,)).values()
            if each.shape == (1, 2)
        ]
        assert torch.equal(remote_gradient, reference.weight.grad)
    for call in (dist_autograd.get_gradients, DistributedOptimizer(torch.optim.SGD, [x]).step):
        with pytest.raises(UsageError, match="No worker has such a context open"):
            call(context_id)
    with pytest.raises(UsageError, match=r"should contain a tensor .* of type Linear"):
        layer.backward()
    assert remote_method(nn.Linear.forward, layer, x).item() == reference(x).item()
    assert [each.owner_name() for each in remote_method(parameter_rrefs, layer)] == ["ps"] * 2


def run_idioms(is_group_first: bool) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    name = ("trainer0", "trainer1", "master", "ps")[rank]
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=20)
    options.init_method = f"file://{os.environ['FOLDER']}/rpc"
    is_trainer = name.startswith("trainer")
    if is_trainer and is_group_first:
        init_group(rank)
    rpc.init_rpc(name, rpc.BackendType.TENSORPIPE, rank, 4, rpc_backend_options=options)
    assert (rpc.get_rpc_timeout(), rpc.is_available()) == (20, True)
    if is_trainer and not is_group_first:
        init_group(rank)
    if name == "master":
        for each in (0, 1):  # wait until it has a group
            rpc_sync(f"trainer{each}", wait_for_group)
        check_hybrid()
        if is_group_first:
            check_batches()
            check_agent()
            check_pipeline()
            check_script()
            check_references()
    rpc.shutdown()
    if is_trainer:
        dist.destroy_process_group()


GROUP = threading.Event()


def init_group(rank: int) -> None:
    init_method = f"file://{os.environ['FOLDER']}/group"
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=init_method)
    GROUP.set()


def wait_for_group() -> None:
    assert GROUP.wait(60)


@pytest.mark.parametrize("is_group_first", [True, False], ids=["group first", "RPC first"])
def test_idioms(ranks: RankServer, is_group_first: bool) -> None:
    ranks.run(4, run_idioms, is_group_first, timeout=None)
