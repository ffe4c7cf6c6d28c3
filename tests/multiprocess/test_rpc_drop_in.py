"""Behaviour that scripts for PyTorch's RPC rely on, from error types to frozen parameters."""

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
    """Import slow modules once, not in each rank."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.rpc")


def run_on_worker_0(function: Callable[[], None]) -> None:
    with worker() as rank:
        if rank == 0:
            function()
        dist.barrier()


# ---- futures ----

RESUME = threading.Event()


def wait_for_resume() -> str:
    assert RESUME.wait(60)
    return "resumed"


def resume() -> None:
    RESUME.set()


def raise_lookup_error(message: str) -> None:
    raise LookupError(message)


def check_futures() -> None:
    slow = rpc.rpc_async("w1", wait_for_resume)
    failed = [rpc.rpc_async("w1", raise_lookup_error, (str(number),)) for number in range(2)]
    with pytest.raises(LookupError):
        torch.futures.wait_all([slow, *failed])
    with pytest.raises(LookupError):
        torch.futures.collect_all([slow, failed[1]]).wait()
    assert not slow.done()
    rpc.rpc_sync("w1", resume)
    both = torch.futures.collect_all([slow, rpc.rpc_async("w1", abs, (-1,))]).wait()
    assert [future.wait() for future in both] == ["resumed", 1]
    assert torch.futures.wait_all([slow]) == ["resumed"]
    # Lists without a call are left to PyTorch.
    plain: torch.futures.Future[int] = torch.futures.Future()
    plain.set_result(3)
    assert torch.futures.wait_all([plain]) == [3]


def test_waiting_for_several_calls_ends_at_the_first_failure(ranks: RankServer) -> None:
    ranks.run(2, run_on_worker_0, check_futures)


# ---- errors ----


def check_errors() -> None:
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: rpc.get_worker_info("nobody"), RuntimeError, "could not find destination"),
        (lambda: rpc.rpc_sync(7, abs, (1,)), RuntimeError, "could not find destination"),
        (lambda: rpc.rpc_sync(0.5, abs, (1,)), ValueError, "could not find destination"),  # type: ignore[arg-type]
        (lambda: rpc.init_rpc("again"), RuntimeError, "is already initialized"),
        (lambda: rpc.rpc_async("w1", abs, (threading.Lock(),)), TypeError, "cannot pickle"),
        (lambda: rpc.rpc_sync("w1", torch.add), RuntimeError, "failed to match any schema"),
        (lambda: rpc.remote("w1", abs, (1,)).local_value(), RuntimeError, "Call it on owner"),
        (lambda: rpc.WorkerInfo("abc*", 0), RuntimeError, "Worker name must match"),
        (lambda: dist_autograd.backward(1, None), TypeError, "incompatible function arg"),  # type: ignore[arg-type]
        (lambda: rpc.rpc_sync("w1", raise_lookup_error, ("own type",)), LookupError, "own type"),
    ]
    for call, error_type, message in cases:
        with pytest.raises(error_type, match=message):
            call()
    with dist_autograd.context(), pytest.raises(RuntimeError, match="Already have"):
        dist_autograd.context().__enter__()
    weight = torch.ones(2, requires_grad=True)
    loss = rpc.rpc_sync("w1", apply_failing_backward, (weight,)).sum()
    with pytest.raises(RemoteError, match="Error on Node 1: no gradient"):
        loss.backward()


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(_ctx: object, *_gradients: Tensor) -> Tensor:
        raise LookupError("no gradient")


def apply_failing_backward(tensor: Tensor) -> Tensor:
    result: Tensor = FailingBackward.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def test_errors_have_pytorch_types(ranks: RankServer) -> None:
    run = ranks.start(2, run_on_worker_0, check_errors)
    exits = run.join()
    assert [each.code for each in exits] == [0, 0], "\n".join(each.report() for each in exits)
    # The worker that executes a call logs its failure.
    assert "LookupError: own type" in exits[1].stderr


# ---- modules and optimizers ----


def make_partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model[0].requires_grad_(False)
    return model


def check_optimizer() -> None:
    module = RemoteModule("w1", make_partly_frozen)
    assert module.module_rref is module.get_module_rref()
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.5)
    reference = make_partly_frozen()
    oracle = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(2):
        oracle.zero_grad()
        for model in (module, reference):
            model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        oracle.step()
    for rref, parameter in zip(module.remote_parameters(), reference.parameters(), strict=True):
        assert torch.equal(rref.to_here().detach(), parameter.detach())


def test_training_of_a_partly_frozen_module(ranks: RankServer) -> None:
    ranks.run(2, run_on_worker_0, check_optimizer)


# ---- TorchScript ----


@torch.jit.script
def scaled(tensor: Tensor, factor: float = 3.0) -> Tensor:
    return tensor * factor


def check_scripts() -> None:
    tensor = torch.ones(2)
    for call in (scaled, make_unimportable_script(os.environ["FOLDER"])):
        assert rpc.rpc_sync("w1", call, (tensor,)).tolist() == [3.0, 3.0]
        assert rpc.rpc_sync("w1", call, (tensor,), {"factor": 2.0}).tolist() == [2.0, 2.0]
        assert rpc.rpc_sync("w1", call, (tensor, 4.0)).tolist() == [4.0, 4.0]
        with pytest.raises(UsageError, match=r"scaled\(\) expected at most 2 argument"):
            rpc.remote("w1", call, (tensor, 2.0, 3.0))


def make_unimportable_script(folder: str) -> torch.jit.ScriptFunction:  # type: ignore[type-arg]
    """Return the same function in a module that cannot be imported."""
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


def test_torchscript_functions_keep_name_and_defaults(ranks: RankServer) -> None:
    ranks.run(2, run_on_worker_0, check_scripts)
