"""Faults of the matrix in programs: data loaders, DDP, checkpoints, sessions, RPC; launchers."""

from __future__ import annotations

import itertools
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
from tests.fault_injection.faults import (
    Body,
    Case,
    Process,
    get_backend,
    mark_fault,
    sleep_until_killed,
)

_TRACEBACK = "traceback is in the stderr of rank {}"


class _Samples(Dataset[torch.Tensor]):
    """Samples; loading the 21st calls `bad` unless it is None."""

    def __init__(self, bad: Callable[[], object] | None) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 21 and self._bad is not None:
            mark_fault()
            self._bad()
        return torch.ones(4)


def _raise(error: Exception) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _load_data(bad: Callable[[], object]) -> Body:
    def body(rank: int) -> None:
        samples = _Samples(bad if rank == 1 else None)
        for batch in DataLoader(samples, batch_size=4, num_workers=2):
            dist.all_reduce(batch)

    return body


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.uses_second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.uses_second else x


def _train(
    rank: int, count: int, prepare: Callable[[_Model, int], object], marked_step: int = -1
) -> None:
    """Train a model; rank 1 records the time of its fault before `marked_step`."""
    model = _Model()
    prepare(model, rank)
    wrapped = DistributedDataParallel(model)
    for step in range(count):
        if rank == 1 and step == marked_step:
            mark_fault()
        wrapped(torch.ones(2, 4)).sum().backward()


def _fail_in_backward(rank: int) -> None:
    def fail(_: torch.Tensor) -> None:
        mark_fault()
        raise ValueError("the gradient is not finite")

    def prepare(model: _Model, rank: int) -> None:
        if rank == 1:
            model.first.weight.register_hook(fail)

    _train(rank, 3, prepare)


def _skip_parameters(rank: int) -> None:
    _train(rank, 3, lambda model, rank: setattr(model, "uses_second", rank != 1), marked_step=1)


def _train_unevenly(rank: int) -> None:
    _train(rank, 3 if rank == 1 else 6, lambda *_: None)
    if rank == 1:
        mark_fault()


def _load(path: str) -> Any:
    return torch.load(path, weights_only=True)


def _restore(victim: int, load: Callable[[str], object]) -> Body:
    """Return a body in which the victim can't load its checkpoint."""

    def body(rank: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.pt")
            torch.save(_Model().state_dict(), path)
            if rank == victim:
                mark_fault()
                load(path)
            dist.barrier()

    return body


def _load_truncated(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)
    _load(path)


def _fail_in_session(begin: Callable[[], object]) -> Body:
    def body(rank: int) -> None:
        with phalanx.init(get_backend()):
            dist.all_reduce(torch.ones(8))
            if rank == 1:
                works = begin()
                mark_fault()
                raise ValueError(f"broken batch after {type(works).__name__}")
            sleep_until_killed()

    return body


def _fail_to_import(rank: int) -> None:
    if rank == 1:
        mark_fault()
        __import__("no_such_module")
    dist.init_process_group(get_backend())


def _run_steadily(rank: int) -> None:
    for step in itertools.count():  # until the launcher is gone
        dist.all_reduce(torch.ones(1000))
        if step == 100 and rank == 0:
            mark_fault()


# RPC.


def _square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _call_remote(remote: Callable[..., object]) -> Body:
    def body(rank: int) -> None:
        import phalanx.rpc as rpc

        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size())
        if rank == 0:
            rpc.rpc_sync("worker1", _square, args=(torch.ones(4),))
            rpc.rpc_sync("worker1", remote)
        rpc.shutdown()

    return body


def _hang_remotely() -> None:
    mark_fault()
    sleep_until_killed()


def _die_remotely() -> None:
    mark_fault()
    _kill()


def _signal_launcher(number: signal.Signals) -> Callable[[Process], None]:
    return lambda process: process.send_signal(number)


def _all_reduce_async() -> Any:
    return dist.all_reduce(torch.ones(1000), async_op=True)


def _make_failure(
    name: str, size: int, body: Body, rank: int, cause: str, advice: str = ""
) -> Case:
    words, advice = f"Rank {rank} .*{cause}", advice or _TRACEBACK.format(rank)
    return Case(name, size, body, (rank,), "failed", words, advice, forms="session" not in name)


CASES = (
    _make_failure(
        "worker_killed",
        2,
        _load_data(_kill),
        1,
        r"DataLoader worker \(pid.*signal: Killed",
        "DataLoader.*journalctl",
    ),
    _make_failure(
        "worker_MemoryError",
        2,
        _load_data(_raise(MemoryError())),
        1,
        "MemoryError",
        "[Uu]se less memory",
    ),
    _make_failure("DDP_hook", 2, _fail_in_backward, 1, "ValueError: the gradient is not finite"),
    _make_failure(
        "DDP_unused", 2, _skip_parameters, 1, "Expected to have finished", "find_unused_parameters"
    ),
    Case(
        "DDP_uneven",
        3,
        _train_unevenly,
        (1,),
        "finished",
        "Rank 1 .*finished early",
        "as many batches",
    ),
    _make_failure("checkpoint_truncated", 2, _restore(0, _load_truncated), 0, "Error: "),
    _make_failure(
        "checkpoint_missing",
        3,
        _restore(1, lambda path: _load(f"{path}.old")),
        1,
        r"FileNotFoundError: .*model\.pt\.old",
    ),
    _make_failure(
        "session_exception", 3, _fail_in_session(lambda: None), 1, "ValueError: broken batch"
    ),
    _make_failure(
        "session_with_work", 2, _fail_in_session(_all_reduce_async), 1, "ValueError: broken batch"
    ),
    Case(
        "import_error",
        2,
        _fail_to_import,
        (1,),
        "failed",
        "Rank 1 .*ModuleNotFoundError: .*",
        _TRACEBACK.format(1),
        forms=False,
    ),
    Case(
        "launcher_SIGKILL",
        2,
        _run_steadily,
        (0, 1),
        "launcher",
        "launcher .*disappeared.*SIGKILL",
        "journalctl",
        disturb=_signal_launcher(signal.SIGKILL),
    ),
    Case(
        "launcher_SIGTERM",
        3,
        _run_steadily,
        (0, 1, 2),
        "launcher",
        "launcher was ended by SIGTERM and stopped ranks 0-2",
        "signal",
        disturb=_signal_launcher(signal.SIGTERM),
    ),
    Case(
        "RPC_hung",
        2,
        _call_remote(_hang_remotely),
        (1,),
        "unanswered",
        "'worker1'.* not answered the call of .*_hang_remotely.*'worker0'.*executing",
        "py-spy|loop",
        hangs=True,
        is_general=False,
    ),
    Case(
        "RPC_dead",
        2,
        _call_remote(_die_remotely),
        (1,),
        "killed",
        "Rank 1 .*SIGKILL",
        "journalctl",
        is_general=False,
    ),
)
