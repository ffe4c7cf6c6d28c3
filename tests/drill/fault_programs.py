"""Faults of the matrix in programs: data loaders, DDP, checkpoints, sessions, RPC; launchers."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import phalanx
from tests.drill.faults import Body, Case, Process, stay, strike

_TRACEBACK = "traceback is in the stderr of rank {}"


class _Samples(Dataset[torch.Tensor]):
    """Samples of which the 21st is bad on one rank."""

    def __init__(self, bad: Callable[[], object] | None) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 21 and self._bad is not None:
            strike()
            self._bad()
        return torch.ones(4)


def _raise(error: Exception) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _loading(bad: Callable[[], object]) -> Body:
    def body(rank: int) -> None:
        samples = _Samples(bad if rank == 1 else None)
        for batch in DataLoader(samples, batch_size=4, num_workers=2):
            dist.all_reduce(batch)

    return body


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.whole = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.whole else x


def _steps(
    rank: int, count: int, prepare: Callable[[_Model, int], object], marked: int = -1
) -> None:
    """Train a model; rank 1 notes a fault before step `marked`."""
    model = _Model()
    prepare(model, rank)
    wrapped = DistributedDataParallel(model)
    for step in range(count):
        if rank == 1 and step == marked:
            strike()
        wrapped(torch.ones(2, 4)).sum().backward()


def _in_backward(rank: int) -> None:
    def fail(_: torch.Tensor) -> None:
        strike()
        raise ValueError("the gradient is not finite")

    def prepare(model: _Model, rank: int) -> None:
        if rank == 1:
            model.first.weight.register_hook(fail)

    _steps(rank, 3, prepare)


def _unused(rank: int) -> None:
    _steps(rank, 3, lambda model, rank: setattr(model, "whole", rank != 1), marked=1)


def _uneven(rank: int) -> None:
    _steps(rank, 3 if rank == 1 else 6, lambda *_: None)
    if rank == 1:
        strike()


def _load(path: str) -> Any:
    return torch.load(path, weights_only=True)


def _restoring(victim: int, load: Callable[[str], object]) -> Body:
    """A rank can't load its checkpoint."""

    def body(rank: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.pt")
            torch.save(_Model().state_dict(), path)
            if rank == victim:
                strike()
                load(path)
            dist.barrier()

    return body


def _truncated(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)
    _load(path)


def _session(begin: Callable[[], object]) -> Body:
    def body(rank: int) -> None:
        with phalanx.init():
            dist.all_reduce(torch.ones(8))
            if rank == 1:
                works = begin()
                strike()
                raise ValueError(f"broken batch after {type(works).__name__}")
            stay()

    return body


def _import(rank: int) -> None:
    if rank == 1:
        strike()
        __import__("no_such_module_of_the_drill")
    dist.init_process_group("phalanx")


def _steady(rank: int) -> None:
    for step in range(10_000):
        dist.all_reduce(torch.ones(1000))
        if step == 100 and rank == 0:
            strike()


# RPC.


def _square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _calling(remote: Callable[..., object]) -> Body:
    def body(rank: int) -> None:
        import phalanx.rpc as rpc

        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size())
        if rank == 0:
            rpc.rpc_sync("worker1", _square, args=(torch.ones(4),))
            rpc.rpc_sync("worker1", remote)
        rpc.shutdown()

    return body


def _hang_remotely() -> None:
    strike()
    stay()


def _die_remotely() -> None:
    strike()
    _kill()


def _send(number: signal.Signals) -> Callable[[Process], None]:
    return lambda process: process.send_signal(number)


def _async() -> Any:
    return dist.all_reduce(torch.ones(1000), async_op=True)


def _failed(name: str, size: int, body: Body, rank: int, cause: str, advice: str = "") -> Case:
    words, advice = f"Rank {rank} .*{cause}", advice or _TRACEBACK.format(rank)
    return Case(name, size, body, (rank,), "failed", words, advice, forms="session" not in name)


CASES = (
    _failed(
        "worker_killed",
        2,
        _loading(_kill),
        1,
        r"DataLoader worker \(pid.*signal: Killed",
        "DataLoader.*journalctl",
    ),
    _failed(
        "worker_MemoryError",
        2,
        _loading(_raise(MemoryError())),
        1,
        "MemoryError",
        "[Uu]se less memory",
    ),
    _failed("DDP_hook", 2, _in_backward, 1, "ValueError: the gradient is not finite"),
    _failed("DDP_unused", 2, _unused, 1, "Expected to have finished", "find_unused_parameters"),
    Case("DDP_uneven", 3, _uneven, (1,), "finished", "Rank 1 .*finished early", "as many batches"),
    _failed("checkpoint_truncated", 2, _restoring(0, _truncated), 0, "Error: "),
    _failed(
        "checkpoint_missing",
        3,
        _restoring(1, lambda path: _load(f"{path}.old")),
        1,
        r"FileNotFoundError: .*model\.pt\.old",
    ),
    _failed("session_exception", 3, _session(lambda: None), 1, "ValueError: broken batch"),
    _failed("session_with_work", 2, _session(_async), 1, "ValueError: broken batch"),
    Case(
        "import_error",
        2,
        _import,
        (1,),
        "exited",
        "Rank 1 .*exit code 1",
        "end of its output",
        forms=False,
    ),
    Case(
        "launcher_SIGKILL",
        2,
        _steady,
        (0, 1),
        "launcher",
        "launcher .*disappeared.*SIGKILL",
        "journalctl",
        disturb=_send(signal.SIGKILL),
    ),
    Case(
        "launcher_SIGTERM",
        3,
        _steady,
        (0, 1, 2),
        "launcher",
        "launcher stopped ranks 0-2",
        "signal",
        disturb=_send(signal.SIGTERM),
    ),
    Case(
        "RPC_hung",
        2,
        _calling(_hang_remotely),
        (1,),
        "unanswered",
        "'worker1'.* not answered the call of .*_hang_remotely.*'worker0'.*executing",
        "py-spy|loop",
        hangs=True,
    ),
    Case("RPC_dead", 2, _calling(_die_remotely), (1,), "killed", "Rank 1 .*SIGKILL", "journalctl"),
)
