"""Messages between the parent and the processes of a system."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hello:
    """The first message of a process, with its identity and the version of its system."""

    rank: int
    pid: int
    version: str = ""
    error: str = ""
    """Reason why the process can't measure, and ends; empty if it can."""


@dataclass(frozen=True)
class PrepareCommand:
    """A command to prepare an operation and free the buffers of the previous one.

    Attributes:
        operation: Name of the operation.
        dtype: Name of the dtype.
        count: Number of elements of the operation.
        buffers: Number of sets of buffers to use in turn.
        seed: Seed of the inputs for which a result is checked; None to check nothing.
        algorithms: Names of algorithms of `phalanx.parallel` to run on the same buffers.
    """

    operation: str
    dtype: str
    count: int
    buffers: int
    seed: int | None
    algorithms: tuple[str, ...] = ()


@dataclass(frozen=True)
class TurnCommand:
    """A command to rewrite all buffers and time an operation; the answer is in seconds.

    Attributes:
        value: Value of the elements of the rewritten buffers.
        operations: Number of operations to time.
        warm_ups: Number of operations to run before, without timing them.
        algorithm: A prepared algorithm; "" for the system's own implementation.
    """

    value: int
    operations: int
    warm_ups: int
    algorithm: str = ""


@dataclass(frozen=True)
class StreamCommand:
    """A command to copy memory on all ranks at the same time; the answer is in bytes per second.

    Attributes:
        method: A name in `phalanx.bench.rank.COPY_METHODS`.
        size: Size of each array in bytes.
        start: Start time on the clock of `time.monotonic`.
        seconds: Duration in seconds.
    """

    method: str
    size: int
    start: float
    seconds: float


@dataclass(frozen=True)
class StopCommand:
    """A command to free all buffers and end."""


Command = PrepareCommand | TurnCommand | StreamCommand | StopCommand


@dataclass(frozen=True)
class Reply:
    """The answer to a command.

    Attributes:
        value: Seconds of one operation for a `TurnCommand`, bytes per second for a `StreamCommand`.
        missing: Reason why the system lacks the operation; empty if it has it.
        wrong: Description of a wrong result; empty if the result is right or was not checked.
        error: Description of the exception that the command raised; empty if it succeeded.
    """

    value: float = 0.0
    missing: str = ""
    wrong: str = ""
    error: str = ""
