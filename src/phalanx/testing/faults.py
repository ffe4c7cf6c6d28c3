"""Faults: what happens to which rank, at which of its operations.

They are plain values that are planned here and strike in the rank's own process (see `striking`).
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
"""The names of operations, as errors name them."""

# What users call, where that has another name.
_OTHER_NAMES = {
    "all_gather_into_tensor": "all_gather_single",
    "irecv": "recv",
    "isend": "send",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


@dataclass(frozen=True)
class Fault:
    """One fault, made by `kill`, `crash`, `fail`, `stop`, `delay` or `skip`.

    Attributes:
        name: Which of these.
        rank: Who suffers it.
        at: At which operation, counted from 1.
        of: Only operations of this name count; all if empty.
        after: Seconds between the beginning of the operation and the fault.
        detail: What else it was given, in words.
        resume: For a rank that is stopped: seconds until it is continued; None for never.
        act: What the rank does.
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
    """Send the rank's process a signal as it begins its `at`-th operation.

    Args:
        rank: The rank in the job.
        at: Which of its operations, counted from 1 over all its groups.
        of: Count only operations of this name, as "all_reduce".
        by: The signal.
        after: Seconds to let the operation go on before; the rank may be out of it by then.
    """
    try:
        number = signal.Signals(by)
    except ValueError:
        raise UsageError(f"kill: by is {by!r}, expected a signal, as signal.SIGTERM") from None
    act = partial(_signal, number)
    return Fault("kill", rank, at, _named(of), after, f"by={number.name}", act=act)


def crash(rank: int, at: int, of: str = "", *, code: int = 1, after: float = 0.0) -> Fault:
    """End the rank's process at once, without any clean-up (`os._exit`), with this exit code.

    The other arguments are those of `kill`.
    """
    check_number("crash: code", code, 0, 255)
    act = partial(os._exit, code)
    return Fault("crash", rank, at, _named(of), after, f"code={code}", act=act)


def fail(rank: int, at: int, of: str = "", *, error: BaseException | None = None) -> Fault:
    """Raise an exception in the rank's own code, out of the call of its `at`-th operation.

    Args:
        rank: The rank in the job.
        at: Which of its operations, counted from 1 over all its groups.
        of: Count only operations of this name.
        error: The exception, as `MemoryError()`; a RuntimeError if None. Its class may be
            one of your script: it travels by cloudpickle.
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
    """Stop the rank's process (SIGSTOP) as it begins its `at`-th operation.

    Args:
        rank: The rank in the job.
        at: Which of its operations, counted from 1 over all its groups.
        of: Count only operations of this name.
        seconds: How long; then the drill continues it (SIGCONT). None: until the others have
            ended, and then it is killed.
        after: Seconds to let the operation go on before.
    """
    if seconds is not None:
        _check_seconds("stop: seconds", seconds)
    act = partial(_signal, signal.SIGSTOP)
    return Fault("stop", rank, at, _named(of), after, f"seconds={seconds}", seconds, act)


def delay(rank: int, at: int, of: str = "", *, seconds: float) -> Fault:
    """Let the rank begin its `at`-th operation so many seconds later.

    The other arguments are those of `kill`.
    """
    _check_seconds("delay: seconds", seconds)
    act = partial(time.sleep, seconds)
    return Fault("delay", rank, at, _named(of), detail=f"seconds={seconds:g}", act=act)


def skip(rank: int, at: int, of: str = "") -> Fault:
    """Leave out the rank's `at`-th operation: to the rank it looks as if it had been done.

    Its tensors stay as they are. The other arguments are those of `kill`.
    """
    return Fault("skip", rank, at, _named(of))


def check(faults: object, ranks: int) -> None:
    """Check that it is a list (or tuple) of faults of a job of so many ranks.

    Raises:
        UsageError: It isn't.
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
    """Check that it is an integer, at least and at most these.

    Raises:
        UsageError: It isn't.
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
