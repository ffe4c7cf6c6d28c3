"""A job as its black boxes and its launcher's notes tell it: plain objects, read once.

Times are nanoseconds of the host's monotonic clock, with one wall-clock anchor per rank; ranks in
an operation are ranks in its group. Texts are as they were written: whoever prints them escapes
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Ending = Literal["", "left", "exited", "failed"]
"""How a rank said that it ends: not yet; all its groups left; the script ended; an exception."""


@dataclass(frozen=True)
class Operation:
    """One operation of one rank.

    Attributes:
        number: Counts the operations of this rank, in all its groups, from 1.
        kind: PyTorch's name for it; "join" while the group is being formed.
        group: Which of the rank's `groups`, by its index; -1 if the table was full.
        sequence: Of a collective: its number in the group, from 1. Of a message: its tag.
        dtype: "float32" and the like; empty where there is none.
        count: Elements.
        op: The reduction, "SUM" and the like; empty where there is none.
        peer: The root, or the other rank of a message; -1 where there is none (or any).
        site: "path:line" of the user's code; empty if not known.
        begin: When it began.
        end: When it ended; 0 while it is under way.
        waited: Nanoseconds spent waiting for peers, as far as they are over.
        waiting_for: The rank waited for, now or (ended) longest; -1: no wait.
        outcome: "ok", or the code of what went wrong ("peer_lost", "mismatch", "timeout", ...).
        thread: 0 for the process's main thread, 1 for the group's own, 2 for another one.
    """

    number: int
    kind: str
    group: int
    sequence: int = 0
    dtype: str = ""
    count: int = 0
    op: str = ""
    peer: int = -1
    site: str = ""
    begin: int = 0
    end: int = 0
    waited: int = 0
    waiting_for: int = -1
    outcome: str = "ok"
    thread: int = 0

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a recv."""
        return self.kind in ("send", "recv")


@dataclass(frozen=True)
class Group:
    """A process group as one of its ranks knows it.

    Attributes:
        identity: The same on all its ranks, and of no other group.
        name: PyTorch's name for it.
        rank: This rank's number in it.
        size: Its world size.
        members: Ranks in the job by their rank in the group; empty if there were too many to note.
        sequence: How many collectives this rank has begun in it.
        left: Whether this rank has left it.
        left_at: Where (a call site); empty if not known.
        why: Why this rank aborted it, in the user's words; empty if it didn't.
    """

    identity: int
    name: str
    rank: int
    size: int
    members: tuple[int, ...] = ()
    sequence: int = 0
    left: bool = False
    left_at: str = ""
    why: str = ""


@dataclass(frozen=True)
class Report:
    """What `phalanx.report` was told: `step` is below 0 and `loss` None where none was given."""

    time: int
    step: int
    loss: float | None


@dataclass(frozen=True)
class Start:
    """What the launcher noted when it started a rank, and when that ended.

    `code` is as in `subprocess`. `stopped`: the launcher had begun to stop the rank before that.
    """

    pid: int
    attempt: int
    time: float
    """Unix seconds."""
    ended: float | None = None
    code: int | None = None
    stopped: bool = False


@dataclass(frozen=True)
class Process:
    """What the kernel says of a rank's process now.

    Attributes:
        state: "running", "sleeping", "stopped" (by a signal), "disk" (uninterruptible), "zombie",
            or "gone".
        cpu: Seconds of processor time that it has used.
        memory: Resident bytes.
    """

    state: str
    cpu: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class Rank:
    """One rank of a job: its black box, what the launcher noted of it, and what the kernel says.

    Attributes:
        rank: Its number in the job.
        pid: Its process; 0 if it never had one that left a trace.
        host: Name of its machine.
        clock: Unix time minus monotonic time in nanoseconds, when the box was opened.
        opened: When the box was opened; 0 if there is no box.
        ending: How it said that it ends.
        last_words: The exception in a line, where `ending` is "failed".
        ended: When it said so; 0 if it didn't.
        groups: In the order in which it formed them.
        open: Operations under way, oldest first.
        history: Ended ones, oldest first: the last few thousand, or as many as were asked for.
        operations: How many operations it has begun in all.
        reports: What `phalanx.report` was told, oldest first: the last few hundred.
        note: The text given to `phalanx.report` last.
        start: What the launcher noted; None if it wasn't started by one of Phalanx.
        process: Its process now; None if it ran on another machine.
        problem: Why its box can't be read; empty if it can (or if there is none).
    """

    rank: int
    pid: int = 0
    host: str = ""
    clock: int = 0
    opened: int = 0
    ending: Ending = ""
    last_words: str = ""
    ended: int = 0
    groups: tuple[Group, ...] = ()
    open: tuple[Operation, ...] = ()
    history: tuple[Operation, ...] = ()
    operations: int = 0
    reports: tuple[Report, ...] = ()
    note: str = ""
    start: Start | None = None
    process: Process | None = None
    problem: str = ""

    @property
    def last(self) -> Operation | None:
        """The operation that ended last."""
        return max(self.history, key=lambda operation: operation.end, default=None)

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return self.process is not None and self.process.state in ("gone", "zombie")


@dataclass(frozen=True)
class Job:
    """A job: all that its directory tells.

    Attributes:
        name: As `phalanx jobs` lists it.
        path: Its directory.
        command: The command line that started it.
        started: Unix seconds.
        world_size: How many ranks it has (as the last attempt says).
        attempt: Which start of its ranks this is, from 0.
        code: The launcher's exit code; None while it runs, or if there is no launcher.
        now: Monotonic nanoseconds of the moment at which it was read.
        ranks: One for each rank from 0 to `world_size` - 1, also for those that left no trace.
        problems: What in the directory could not be read, in words.
        hosts: On how many hosts it is; the ranks here are those of one of them.
    """

    name: str
    path: str
    command: tuple[str, ...] = ()
    started: float = 0.0
    world_size: int = 0
    attempt: int = 0
    code: int | None = None
    now: int = 0
    ranks: tuple[Rank, ...] = field(default=())
    problems: tuple[str, ...] = ()
    hosts: int = 1

    @property
    def running(self) -> bool:
        """Whether any of its processes on this machine is alive."""
        return any(rank.process is not None and not rank.gone for rank in self.ranks)
