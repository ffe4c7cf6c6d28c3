"""Fault injection in this process, by a subclass of the process group that counts operations.

The subclass replaces the backend's process group while faults are enabled. A process without faults
therefore runs none of this code. In a process with faults, they apply to operations of every
caller: the user's code, DDP's reducer and functional collectives, which call the same methods from
C++.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from phalanx.backend import process_group
from phalanx.backend.work import FinishedMessage
from phalanx.errors import UsageError
from phalanx.testing.faults import Fault, check_faults, check_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["disable_faults", "enable_faults"]

_OriginalProcessGroup = process_group.ProcessGroup


def enable_faults(
    faults: Sequence[Fault], rank: int | None = None, *, record: str | None = None
) -> None:
    """Enable the faults of this process's rank; `FaultRunner` calls this in each rank.

    In processes that another launcher starts, such as torchrun, call it before the group is formed.
    Counting starts now, for operations of all groups of Phalanx that are formed from now on.
    Operations that NCCL carries out do not count. Faults enabled earlier are discarded.

    Args:
        faults: Faults of any rank.
        rank: Rank of this process in the job; the value of `RANK` if None.
        record: Path of a file to which operations and faults are appended as they happen.

    Raises:
        UsageError: `rank` is None and `RANK` is not set, or `faults` contains something that is
            not a fault.
    """
    if rank is None:
        if not os.environ.get("RANK", "").isdigit():
            raise UsageError(
                "enable_faults: RANK is not set or not a number: pass the rank of this process"
            )
        rank = int(os.environ["RANK"])
    check_number("enable_faults: rank", rank, 0)
    check_faults(faults, 2**31)
    _FaultInjectingProcessGroup.plan = _FaultPlan(faults, rank, record)
    process_group.ProcessGroup = _FaultInjectingProcessGroup  # type: ignore[misc]


def disable_faults() -> None:
    """Discard all faults; groups formed from now on are of the backend's own class."""
    _FaultInjectingProcessGroup.plan = None
    process_group.ProcessGroup = _OriginalProcessGroup  # type: ignore[misc]


class _FaultPlan:
    """The pending faults of one rank, and the counts of its operations."""

    def __init__(self, faults: Sequence[Fault], rank: int, record: str | None) -> None:
        self._pending = [(n, fault) for n, fault in enumerate(faults) if fault.rank == rank]
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._record = None if record is None else os.open(record, flags, 0o600)

    def inject(self, name: str) -> bool:
        """Count an operation and inject its faults; return whether to skip the operation."""
        with self._lock:
            self._write(name)
            due = self._take_due(name)
        for number, fault in due:
            if fault.after:
                timer = threading.Timer(fault.after, self._perform, (number, fault))
                timer.daemon = True
                timer.start()
            else:
                self._perform(number, fault)
        return any(fault.name == "skip" for _, fault in due)

    def _take_due(self, name: str) -> list[tuple[int, Fault]]:
        for counted in ("", name):
            self._counts[counted] = self._counts.get(counted, 0) + 1
        due = [
            (number, fault)
            for number, fault in self._pending
            if fault.operation in ("", name) and fault.nth == self._counts[fault.operation]
        ]
        if due:
            self._pending = [entry for entry in self._pending if entry not in due]
        return due

    def _perform(self, number: int, fault: Fault) -> None:
        self._write(f"! {number} {time.monotonic()!r}")
        if fault.action is not None:
            fault.action()

    def _write(self, line: str) -> None:
        if self._record is not None:
            os.write(self._record, f"{line}\n".encode())


class _FaultInjectingProcessGroup(_OriginalProcessGroup):
    """A process group that injects faults into operations.

    Every operation passes exactly one of the overridden methods, with its arguments checked.
    """

    plan: _FaultPlan | None = None

    def _run_collective(self, name: str, call: Any, *arguments: Any, **options: Any) -> dist.Work:
        if self.plan is not None and self.plan.inject(name):
            call = _do_nothing
        return super()._run_collective(name, call, *arguments, **options)

    def _send(self, dst: int, tag: int, blocking: bool, tensors: list[torch.Tensor]) -> dist.Work:
        if self.plan is not None and self.plan.inject("send"):
            return FinishedMessage(tensors, dst)
        return super()._send(dst, tag, blocking, tensors)

    def _recv(self, src: int, tag: int, blocking: bool, tensors: list[torch.Tensor]) -> dist.Work:
        if self.plan is not None and self.plan.inject("recv"):
            return FinishedMessage(tensors, max(src, 0))
        return super()._recv(src, tag, blocking, tensors)


def _do_nothing(_timeout: float) -> None:
    """Do nothing, in place of the core's call of a skipped operation."""
