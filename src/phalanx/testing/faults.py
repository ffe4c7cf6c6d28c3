"""Faults: an action that a given rank suffers at a given operation.

A fault is a plain value. `injector` injects it in the rank's own process.
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
    "check_faults",
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
        nth: Number of the operation at which the fault happens, counted from 1.
        operation: Name of the operations that count; empty to count all operations.
        after: Seconds between the start of the operation and the fault.
        detail: Description of the other arguments.
        resume_after: Seconds until a stopped rank is resumed; None for never.
        action: The action that the rank performs; None for none.
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
        check_number(f"{self}: rank", self.rank, 0)
        check_number(f"{self}: nth", self.nth, 1)
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
    """
    try:
        number = signal.Signals(sig)
    except ValueError:
        raise UsageError(
            f"kill: sig is {sig!r}, expected a signal such as signal.SIGTERM"
        ) from None
    action = partial(_signal, number)
    return Fault(
        "kill", rank, nth, _canonical_name(operation), after, f"sig={number.name}", action=action
    )


def crash(rank: int, nth: int, operation: str = "", *, code: int = 1, after: float = 0.0) -> Fault:
    """End the rank's process with exit code `code`, without any cleanup (`os._exit`).

    The other arguments are those of `kill`.
    """
    check_number("crash: code", code, 0, 255)
    action = partial(os._exit, code)
    return Fault(
        "crash", rank, nth, _canonical_name(operation), after, f"code={code}", action=action
    )


def fail(rank: int, nth: int, operation: str = "", *, error: BaseException | None = None) -> Fault:
    """Raise an exception from the rank's call of its `nth` operation.

    Args:
        rank: The rank in the job.
        nth: Number of the operation, counted from 1 over all groups of the rank.
        operation: Name of the operations to count; empty to count all operations.
        error: The exception, such as `MemoryError()`; a RuntimeError if None. Its class may be
            defined in your script, since cloudpickle serializes it.
    """
    if error is None:
        error = RuntimeError("an injected fault")
    if not isinstance(error, BaseException):
        raise UsageError(f"fail: error is {error!r}, expected an exception such as MemoryError()")
    action = partial(_raise, error)
    return Fault(
        "fail", rank, nth, _canonical_name(operation), detail=f"error={error!r}", action=action
    )


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
    """
    if seconds is not None:
        _check_seconds("stop: seconds", seconds)
    action = partial(_signal, signal.SIGSTOP)
    return Fault(
        "stop", rank, nth, _canonical_name(operation), after, f"seconds={seconds}", seconds, action
    )


def delay(rank: int, nth: int, operation: str = "", *, seconds: float) -> Fault:
    """Delay the rank's `nth` operation by `seconds`.

    The other arguments are those of `kill`.
    """
    _check_seconds("delay: seconds", seconds)
    action = partial(time.sleep, seconds)
    return Fault(
        "delay", rank, nth, _canonical_name(operation), detail=f"seconds={seconds:g}", action=action
    )


def skip(rank: int, nth: int, operation: str = "") -> Fault:
    """Skip the rank's `nth` operation; to the rank, the operation appears to have completed.

    Its tensors are left unchanged. The other arguments are those of `kill`.
    """
    return Fault("skip", rank, nth, _canonical_name(operation))


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


def _canonical_name(operation: str) -> str:
    if not isinstance(operation, str):
        raise UsageError(f"operation is {operation!r}, expected a name such as 'all_reduce'")
    return _OTHER_NAMES.get(operation, operation)


def check_number(name: str, number: object, least: int, most: float = float("inf")) -> None:
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
