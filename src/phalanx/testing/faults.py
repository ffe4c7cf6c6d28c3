"""Faults: an action that a given rank suffers at a given operation.

A fault is a plain value. `striking` injects it in the rank's own process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from phalanx.errors import UsageError

__all__ = [
    "OPERATIONS",
    "Fault",
    "check",
    "check_number",
    "crash",
    "delay",
    "fail",
    "kill",
    "skip",
    "stop",
]

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
        at: Number of the operation at which the fault happens, counted from 1.
        of: Name of the operations that count; empty to count all operations.
        after: Seconds between the start of the operation and the fault.
        detail: Description of the other arguments.
        resume: Seconds until a stopped rank is resumed; None for never.
        act: The action that the rank performs; None for none.
    """

    name: str
    rank: int
    at: int
    of: str = ""
    after: float = 0.0
    detail: str = ""
    resume: float | None = None
    act: Callable[[], object] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number(f"{self}: rank", self.rank, 0)
        check_number(f"{self}: at", self.at, 1)
        if self.of and self.of not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise UsageError(f"{self}: no operation is named {self.of!r}; expected {known}")
        _check_seconds(f"{self}: after", self.after)

    def __str__(self) -> str:
        words = [f"rank={self.rank}", f"at={self.at}"]
        words += [f"of={self.of!r}"] if self.of else []
        words += [self.detail] if self.detail else []
        words += [f"after={self.after}"] if self.after else []
        return f"{self.name}({', '.join(words)})"


def kill(
    rank: int, at: int, of: str = "", *, by: int = signal.SIGKILL, after: float = 0.0
) -> Fault:
    """Send a signal to the rank's process as the rank begins its `at`-th operation.

    Args:
        rank: The rank in the job.
        at: Number of the operation, counted from 1 over all groups of the rank.
        of: Name of the operations to count, such as "all_reduce"; empty to count all operations.
        by: The signal.
        after: Seconds from the start of the operation to the signal. The rank may have finished
            the operation by then.
    """
    try:
        number = signal.Signals(by)
    except ValueError:
        raise UsageError(f"kill: by is {by!r}, expected a signal, as signal.SIGTERM") from None
    act = partial(_signal, number)
    return Fault("kill", rank, at, _named(of), after, f"by={number.name}", act=act)


def crash(rank: int, at: int, of: str = "", *, code: int = 1, after: float = 0.0) -> Fault:
    """End the rank's process with exit code `code`, without any cleanup (`os._exit`).

    The other arguments are those of `kill`.
    """
    check_number("crash: code", code, 0, 255)
    act = partial(os._exit, code)
    return Fault("crash", rank, at, _named(of), after, f"code={code}", act=act)


def fail(rank: int, at: int, of: str = "", *, error: BaseException | None = None) -> Fault:
    """Raise an exception from the rank's call of its `at`-th operation.

    Args:
        rank: The rank in the job.
        at: Number of the operation, counted from 1 over all groups of the rank.
        of: Name of the operations to count; empty to count all operations.
        error: The exception, such as `MemoryError()`; a RuntimeError if None. Its class may be
            defined in your script, since cloudpickle serializes it.
    """
    if error is None:
        error = RuntimeError("a fault of the drill")
    if not isinstance(error, BaseException):
        raise UsageError(f"fail: error is {error!r}, expected an exception, as MemoryError()")
    act = partial(_raise, error)
    return Fault("fail", rank, at, _named(of), detail=f"error={error!r}", act=act)


def stop(
    rank: int, at: int, of: str = "", *, seconds: float | None = None, after: float = 0.0
) -> Fault:
    """Stop the rank's process (SIGSTOP) as the rank begins its `at`-th operation.

    Args:
        rank: The rank in the job.
        at: Number of the operation, counted from 1 over all groups of the rank.
        of: Name of the operations to count; empty to count all operations.
        seconds: Seconds until the drill resumes the rank (SIGCONT). If None, the rank stays stopped
            until the others have ended; then it is killed.
        after: Seconds from the start of the operation to the stop.
    """
    if seconds is not None:
        _check_seconds("stop: seconds", seconds)
    act = partial(_signal, signal.SIGSTOP)
    return Fault("stop", rank, at, _named(of), after, f"seconds={seconds}", seconds, act)


def delay(rank: int, at: int, of: str = "", *, seconds: float) -> Fault:
    """Delay the rank's `at`-th operation by `seconds`.

    The other arguments are those of `kill`.
    """
    _check_seconds("delay: seconds", seconds)
    act = partial(time.sleep, seconds)
    return Fault("delay", rank, at, _named(of), detail=f"seconds={seconds:g}", act=act)


def skip(rank: int, at: int, of: str = "") -> Fault:
    """Skip the rank's `at`-th operation; to the rank, the operation appears to have completed.

    Its tensors are left unchanged. The other arguments are those of `kill`.
    """
    return Fault("skip", rank, at, _named(of))


def check(faults: object, ranks: int) -> None:
    """Check that `faults` is a list or tuple of faults for a job of `ranks` ranks.

    Raises:
        UsageError: It is not.
    """
    if not isinstance(faults, list | tuple):
        raise UsageError(f"faults is {faults!r}, expected a list, as [kill(rank=1, at=3)]")
    for fault in faults:
        if not isinstance(fault, Fault):
            raise UsageError(f"faults has {fault!r}, expected kill(...), stop(...) and the like")
        if fault.rank >= ranks:
            raise UsageError(f"{fault}: rank {fault.rank}, expected 0 to {ranks - 1}")


def _named(of: str) -> str:
    if not isinstance(of, str):
        raise UsageError(f"of is {of!r}, expected the name of an operation, as 'all_reduce'")
    return _OTHER_NAMES.get(of, of)


def check_number(what: str, number: object, least: int, most: float = float("inf")) -> None:
    """Check that `number` is an integer from `least` to `most`.

    Raises:
        UsageError: It is not.
    """
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        end = "" if most == float("inf") else f" to {most}"
        raise UsageError(f"{what} is {number!r}, expected an integer from {least}{end}")


def _check_seconds(what: str, seconds: object) -> None:
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds < float("inf"):  # type: ignore[operator]
        raise UsageError(f"{what} is {seconds!r}, expected seconds, 0 or more")


def _signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _raise(error: BaseException) -> None:
    raise error
