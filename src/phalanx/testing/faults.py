"""Faults, and their injection in the process of the rank that suffers them.

A fault is a plain value: an action that a given rank suffers at a given operation. While faults are
enabled, three methods of each new group's parts, which every operation passes, are wrapped by
functions that count operations. A process without faults runs none of this code. In a process
with faults, they apply to operations of every caller: the user's code, DDP's reducer and functional
collectives, which call the same methods from C++.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from phalanx.backend import process_group
from phalanx.backend.work import FinishedWork
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


OPERATIONS = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)
"""The names of operations, as error messages show them."""

# Other names under which users call these operations.
_OTHER_NAMES = {
    "all_gather_into_tensor": "all_gather_single",
    "irecv": "recv",
    "isend": "send",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


@dataclass(frozen=True)
class Fault:
    """A fault, created by `kill`, `crash`, `fail`, `stop`, `delay` or `skip`.

    Attributes:
        name: The name of the function that created the fault.
        rank: The rank that suffers the fault.
        nth: Number of the operation at which the fault happens, counted from 1.
        operation: Name of the operations that count; empty to count all operations.
        after: Seconds between the start of the operation and the fault.
        detail: Description of the other arguments.
        resume_after: Seconds until a stopped rank is resumed; None for never.
        action: The action that the rank performs; None for none.

    Example:
        >>> fault = kill(rank=1, nth=3, operation="all_reduce")
        >>> fault.name, fault.rank, fault.nth
        ('kill', 1, 3)
    """

    name: str
    rank: int
    nth: int
    operation: str = ""
    after: float = 0.0
    detail: str = ""
    resume_after: float | None = None
    action: Callable[[], object] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.operation, str):
            raise UsageError(
                f"operation is {self.operation!r}, expected a name such as 'all_reduce'"
            )
        known_name = _OTHER_NAMES.get(self.operation, self.operation)
        object.__setattr__(self, "operation", known_name)
        _check_number(f"{self}: rank", self.rank, 0)
        _check_number(f"{self}: nth", self.nth, 1)
        if self.operation and self.operation not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise UsageError(f"{self}: no operation is named {self.operation!r}; expected {known}")
        _check_seconds(f"{self}: after", self.after)

    def __str__(self) -> str:
        words = [f"rank={self.rank}", f"nth={self.nth}"]
        words += [f"operation={self.operation!r}"] if self.operation else []
        words += [self.detail] if self.detail else []
        words += [f"after={self.after}"] if self.after else []
        return f"{self.name}({', '.join(words)})"


def kill(
    rank: int, nth: int, operation: str = "", *, sig: int = signal.SIGKILL, after: float = 0.0
) -> Fault:
    """Send a signal to the rank's process as the rank begins its `nth` operation.

    Args:
        rank: The rank in the job.
        nth: Number of the operation, counted from 1 over all groups of the rank.
        operation: Name of the operations to count, such as "all_reduce"; empty to count all
            operations.
        sig: The signal.
        after: Seconds from the start of the operation to the signal. The rank may have finished
            the operation by then.

    Example:
        >>> result = runner.run(train, 2, faults=[kill(rank=1, nth=3, sig=signal.SIGTERM)])
        >>> result[1].code
        -15
    """
    try:
        number = signal.Signals(sig)
    except ValueError:
        raise UsageError(
            f"kill: sig is {sig!r}, expected a signal such as signal.SIGTERM"
        ) from None
    action = partial(_signal, number)
    return Fault("kill", rank, nth, operation, after, f"sig={number.name}", action=action)


def crash(rank: int, nth: int, operation: str = "", *, code: int = 1, after: float = 0.0) -> Fault:
    """End the rank's process with exit code `code`, without any cleanup (`os._exit`).

    The other arguments are those of `kill`.

    Example:
        >>> result = runner.run(train, 2, faults=[crash(rank=1, nth=3, code=9)])
        >>> result[1].code
        9
    """
    _check_number("crash: code", code, 0, 255)
    action = partial(os._exit, code)
    return Fault("crash", rank, nth, operation, after, f"code={code}", action=action)


def fail(rank: int, nth: int, operation: str = "", *, error: BaseException | None = None) -> Fault:
    """Raise an exception from the rank's call of its `nth` operation.

    Args:
        rank: The rank in the job.
        nth: Number of the operation, counted from 1 over all groups of the rank.
        operation: Name of the operations to count; empty to count all operations.
        error: The exception, such as `MemoryError()`; a RuntimeError if None. Its class may be
            defined in your script, since cloudpickle serializes it.

    Example:
        >>> result = runner.run(train, 2, faults=[fail(rank=1, nth=3, error=MemoryError())])
        >>> result.errors[1]
        MemoryError()
    """
    if error is None:
        error = RuntimeError("an injected fault")
    if not isinstance(error, BaseException):
        raise UsageError(f"fail: error is {error!r}, expected an exception such as MemoryError()")
    action = partial(_raise, error)
    return Fault("fail", rank, nth, operation, detail=f"error={error!r}", action=action)


def stop(
    rank: int, nth: int, operation: str = "", *, seconds: float | None = None, after: float = 0.0
) -> Fault:
    """Stop the rank's process (SIGSTOP) as the rank begins its `nth` operation.

    Args:
        rank: The rank in the job.
        nth: Number of the operation, counted from 1 over all groups of the rank.
        operation: Name of the operations to count; empty to count all operations.
        seconds: Seconds until the runner resumes the rank (SIGCONT). If None, the rank stays
            stopped until the others have ended; then it is killed.
        after: Seconds from the start of the operation to the stop.

    Example:
        >>> result = runner.run(train, 2, faults=[stop(rank=1, nth=3, seconds=0.5)])
        >>> [rank.returned for rank in result]
        [True, True]
    """
    if seconds is not None:
        _check_seconds("stop: seconds", seconds)
    action = partial(_signal, signal.SIGSTOP)
    return Fault("stop", rank, nth, operation, after, f"seconds={seconds}", seconds, action)


def delay(rank: int, nth: int, operation: str = "", *, seconds: float) -> Fault:
    """Delay the rank's `nth` operation by `seconds`.

    The other arguments are those of `kill`.

    Example:
        >>> result = runner.run(train, 2, faults=[delay(rank=1, nth=3, seconds=0.5)])
        >>> [rank.returned for rank in result]
        [True, True]
    """
    _check_seconds("delay: seconds", seconds)
    action = partial(time.sleep, seconds)
    return Fault("delay", rank, nth, operation, detail=f"seconds={seconds:g}", action=action)


def skip(rank: int, nth: int, operation: str = "") -> Fault:
    """Skip the rank's `nth` operation; to the rank, the operation appears to have completed.

    Its tensors are left unchanged. The other arguments are those of `kill`.

    Example:
        >>> result = runner.run(train, 2, faults=[skip(rank=1, nth=3)])
        >>> result.errors[0]  # rank 1 ends one operation earlier
        CollectiveMismatch('[rank 0/2 on ...] all_reduce #8 ...: rank 1 (pid ...) has left ...')
    """
    return Fault("skip", rank, nth, operation)


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

    Example:
        >>> enable_faults([kill(rank=1, nth=100)])  # in each process, started by torchrun
        >>> train()
    """
    global _plan  # noqa: PLW0603 - a process is one rank
    if rank is None:
        if not os.environ.get("RANK", "").isdigit():
            raise UsageError(
                "enable_faults: RANK is not set or not a number: pass the rank of this process"
            )
        rank = int(os.environ["RANK"])
    _check_number("enable_faults: rank", rank, 0)
    check_faults(faults, 2**31)
    _plan = _FaultPlan(faults, rank, record)
    process_group.on_create = _wrap_operations


def disable_faults() -> None:
    """Discard all faults; groups formed from now on are those of the backend, unchanged.

    Example:
        >>> enable_faults([kill(rank=0, nth=100)])
        >>> disable_faults()  # before a phase that must not be disturbed
    """
    global _plan  # noqa: PLW0603
    _plan = None
    process_group.on_create = None


def check_faults(faults: object, ranks: int) -> None:
    """Check that `faults` is a list or tuple of faults for a job of `ranks` ranks.

    Raises:
        UsageError: It is not.
    """
    if not isinstance(faults, list | tuple):
        raise UsageError(f"faults is {faults!r}, expected a list such as [kill(rank=1, nth=3)]")
    for fault in faults:
        if not isinstance(fault, Fault):
            raise UsageError(
                f"faults contains {fault!r}, expected faults such as kill(...) or stop(...)"
            )
        if fault.rank >= ranks:
            raise UsageError(f"{fault}: rank {fault.rank}, expected 0 to {ranks - 1}")


def _check_number(name: str, number: object, least: int, most: float = float("inf")) -> None:
    """Check that `number` is an integer from `least` to `most`.

    Raises:
        UsageError: It is not.
    """
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        end = "" if most == float("inf") else f" to {most}"
        raise UsageError(f"{name} is {number!r}, expected an integer from {least}{end}")


def _check_seconds(name: str, seconds: object) -> None:
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds < float("inf"):  # type: ignore[operator]
        raise UsageError(f"{name} is {seconds!r}, expected seconds, 0 or more")


def _signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _raise(error: BaseException) -> None:
    raise error


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


_plan: _FaultPlan | None = None


def _wrap_operations(group: process_group.ProcessGroup) -> None:
    """Wrap three methods of a group's parts; each operation passes one of them."""
    executor, messages = group._executor, group._messages
    group._membership.is_direct = False  # direct calls pass none of the methods
    run, send, recv = executor.run, messages.send, messages.recv

    def run_or_skip(name: str, call: Any, *arguments: Any) -> dist.Work:
        return run(name, _do_nothing if _inject(name) else call, *arguments)

    def send_or_skip(operator: Any, dst: int, tag: int, blocking: bool) -> dist.Work:
        if _inject("send"):
            return FinishedWork(operator[2], dst)
        return send(operator, dst, tag, blocking)

    def recv_or_skip(operator: Any, src: int, tag: int, blocking: bool) -> dist.Work:
        if _inject("recv"):
            return FinishedWork(operator[2], max(src, 0))
        return recv(operator, src, tag, blocking)

    executor.run = run_or_skip  # type: ignore[assignment, method-assign]
    messages.send = send_or_skip  # type: ignore[method-assign]
    messages.recv = recv_or_skip  # type: ignore[method-assign]


def _inject(name: str) -> bool:
    """Inject the faults of an operation; return whether to skip it."""
    return _plan is not None and _plan.inject(name)


def _do_nothing(_timeout: float) -> None:
    """Do nothing, in place of the core's call of a skipped operation."""
