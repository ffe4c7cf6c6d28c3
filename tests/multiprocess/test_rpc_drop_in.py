"""Behaviour that scripts for PyTorch's RPC rely on, from types of errors to frozen parameters."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import rpc
from phalanx.errors import RemoteError, UsageError
from phalanx.rpc import DistributedOptimizer, RemoteModule
from phalanx.rpc import autograd as dist_autograd
from tests.ranks import RankServer
from tests.rpc_training import worker


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Imported once, not by each rank: what the step of an optimizer imports too."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


def as_worker_0(function: Callable[[], None]) -> None:
    with worker() as rank:
        if rank == 0:
            function()
        dist.barrier()


# ---- futures ----

GO_ON = threading.Event()


def wait_to_go_on() -> str:
    assert GO_ON.wait(60)
    return "went on"


def go_on() -> None:
    GO_ON.set()


def fail(words: str) -> None:
    raise LookupError(words)


def futures() -> None:
    slow = rpc.rpc_async("w1", wait_to_go_on)
    failed = [rpc.rpc_async("w1", fail, (str(number),)) for number in range(2)]
    with pytest.raises(LookupError):
        torch.futures.wait_all([slow, *failed])
    with pytest.raises(LookupError):
        torch.futures.collect_all([slow, failed[1]]).wait()
    assert not slow.done()
    rpc.rpc_sync("w1", go_on)
    both = torch.futures.collect_all([slow, rpc.rpc_async("w1", abs, (-1,))]).wait()
    assert [future.wait() for future in both] == ["went on", 1]
    assert torch.futures.wait_all([slow]) == ["went on"]
    # Lists without a call are PyTorch's own business.
    plain: torch.futures.Future[int] = torch.futures.Future()
    plain.set_result(3)
    assert torch.futures.wait_all([plain]) == [3]


def test_waiting_for_several_calls_ends_at_the_first_failure(ranks: RankServer) -> None:
    ranks.run(2, as_worker_0, futures)


# ---- errors ----


def errors() -> None:
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: rpc.get_worker_info("nobody"), RuntimeError, "could not find destination"),
        (lambda: rpc.rpc_sync(7, abs, (1,)), RuntimeError, "could not find destination"),
        (lambda: rpc.rpc_sync(0.5, abs, (1,)), ValueError, "could not find destination"),  # type: ignore[arg-type]
        (lambda: rpc.init_rpc("again"), RuntimeError, "is already initialized"),
        (lambda: rpc.rpc_async("w1", abs, (threading.Lock(),)), TypeError, "cannot pickle"),
        (lambda: rpc.rpc_sync("w1", torch.add), RuntimeError, "failed to match any schema"),
        (lambda: rpc.remote("w1", abs, (1,)).local_value(), RuntimeError, "Call it on owner"),
        (lambda: rpc.WorkerInfo("abc*", 0), RuntimeError, "Worker name must match"),
        (lambda: dist_autograd.backward(1, None), TypeError, "incompatible function arg"),  # type: ignore[arg-type]
        (lambda: rpc.rpc_sync("w1", fail, ("own type",)), LookupError, "own type"),
    ]
    for call, kind, words in wrong:
        with pytest.raises(kind, match=words):
            call()
    with dist_autograd.context(), pytest.raises(RuntimeError, match="Already have"):
        dist_autograd.context().__enter__()
    weight = torch.ones(2, requires_grad=True)
    loss = rpc.rpc_sync("w1", failing_in_backward, (weight,)).sum()
    with pytest.raises(RemoteError, match="Error on Node 1: no gradient"):
        loss.backward()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(_ctx: object, *_gradients: Tensor) -> Tensor:
        raise LookupError("no gradient")


def failing_in_backward(tensor: Tensor) -> Tensor:
    result: Tensor = Failing.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def test_errors_have_the_types_that_pytorch_raises(ranks: RankServer) -> None:
    run = ranks.start(2, as_worker_0, errors)
    ended = run.join()
    assert [each.code for each in ended] == [0, 0], "\n".join(each.report() for each in ended)
    # The worker that executes a call logs why it failed.
    assert "LookupError: own type" in ended[1].stderr


# ---- modules and optimizers ----


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model[0].requires_grad_(False)
    return model


def optimizers() -> None:
    module = RemoteModule("w1", partly_frozen)
    assert module.module_rref is module.get_module_rref()
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.5)
    alone = partly_frozen()
    oracle = torch.optim.SGD(alone.parameters(), lr=0.5)
    for _ in range(2):
        oracle.zero_grad()
        for model in (module, alone):
            model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        oracle.step()
    for reference, parameter in zip(module.remote_parameters(), alone.parameters(), strict=True):
        assert torch.equal(reference.to_here().detach(), parameter.detach())


def test_a_partly_frozen_module_is_trained(ranks: RankServer) -> None:
    ranks.run(2, as_worker_0, optimizers)


# ---- TorchScript ----


@torch.jit.script
def scaled(tensor: Tensor, factor: float = 3.0) -> Tensor:
    return tensor * factor


def scripts() -> None:
    one = torch.ones(2)
    for call in (scaled, by_value(os.environ["FOLDER"])):
        assert rpc.rpc_sync("w1", call, (one,)).tolist() == [3.0, 3.0]
        assert rpc.rpc_sync("w1", call, (one,), {"factor": 2.0}).tolist() == [2.0, 2.0]
        assert rpc.rpc_sync("w1", call, (one, 4.0)).tolist() == [4.0, 4.0]
        with pytest.raises(UsageError, match=r"scaled\(\) expected at most 2 argument"):
            rpc.remote("w1", call, (one, 2.0, 3.0))


def by_value(folder: str) -> torch.jit.ScriptFunction:  # type: ignore[type-arg]
    """The same function under a name that leads to nothing."""
    source = (
        "import torch\n"
        "def scaled(tensor: torch.Tensor, factor: float = 3.0):\n"
        "    return tensor * factor\n"
    )
    path = f"{folder}/scaled_source.py"
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)
    names: dict[str, object] = {"__name__": "no_module"}
    exec(compile(source, path, "exec"), names)
    return torch.jit.script(names["scaled"])


def test_functions_of_torchscript_keep_name_and_defaults(ranks: RankServer) -> None:
    ranks.run(2, as_worker_0, scripts)
