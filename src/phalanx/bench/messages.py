"""What the parent says to the processes of a system, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Command", "Hello", "Prepare", "Reply", "Stop", "Stream", "Turn"]


@dataclass(frozen=True)
class Hello:
    """A process's first words: who it is, and the version of what it measures."""

    rank: int
    pid: int
    version: str = ""
    error: str = ""
    """Why it can't measure; it ends then."""


@dataclass(frozen=True)
class Prepare:
    """Get ready for an operation; buffers of earlier ones are freed.

    Attributes:
        operation: Its name.
        dtype: Its name.
        count: Elements of the operation.
        buffers: How many sets of buffers to take in turn.
        seed: Of the inputs for which one result is compared; None compares nothing.
        algorithms: Of `phalanx.parallel`, that do the operation too, on the same buffers.
    """

    operation: str
    dtype: str
    count: int
    buffers: int
    seed: int | None
    algorithms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """Rewrite all buffers, then time `operations` after some that aren't timed: seconds of one.

    They are done by an algorithm of those that were prepared; "" is the system's own way.
    """

    value: int
    operations: int
    warm_ups: int
    algorithm: str = ""


@dataclass(frozen=True)
class Stream:
    """Move memory from one moment on for a while, all ranks together: bytes a second.

    Attributes:
        method: One of `phalanx.bench.memory.METHODS`.
        size: Bytes of each array.
        start: When, as `time.monotonic` counts.
        seconds: For how long.
    """

    method: str
    size: int
    start: float
    seconds: float


@dataclass(frozen=True)
class Stop:
    """Free everything and end."""


Command = Prepare | Turn | Stream | Stop


@dataclass(frozen=True)
class Reply:
    """The answer to a command.

    Attributes:
        value: Seconds for a turn, bytes a second for a stream.
        missing: The system doesn't have this operation: why.
        wrong: The result isn't the expected one: how.
        error: The command failed: what was raised.
    """

    value: float = 0.0
    missing: str = ""
    wrong: str = ""
    error: str = ""
