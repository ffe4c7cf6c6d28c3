"""Plain objects that describe a job, read once from its flight recorders and its launcher's log.

Times are nanoseconds of the host's monotonic clock, with one wall-clock anchor per rank. Ranks in
an operation are ranks in its group. Texts are unescaped: code that prints them must escape them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Ending = Literal["", "left", "exited", "failed"]
"""A rank's own record of its end: none yet, all groups left, end of the script, an exception."""


@dataclass(frozen=True)
class Operation:
    """An operation of a rank.

    Attributes:
        number: The number of the operation among all those of this rank, from 1.
        kind: PyTorch's name of the operation; "join" while the group is being formed.
        group: The index of its group in the rank's `groups`; -1 if the table was full.
        sequence: The number of a collective in its group, from 1; the tag of a message.
        dtype: The dtype, such as "float32"; empty if there is none.
        count: The number of elements.
        op: The reduction, such as "SUM"; empty if there is none.
        peer: The root, or the other rank of a message; -1 for none or any.
        site: The call site in the user's code, "path:line"; empty if unknown.
        begin: The time at which it began.
        end: The time at which it ended; 0 while it is under way.
        waited: Nanoseconds spent in completed waits for peers.
        waiting_for: The rank waited for now or, once ended, for the longest time; -1 for no wait.
        outcome: "ok", or the error code ("peer_lost", "mismatch", "timeout", ...).
        thread: 0 for the process's main thread, 1 for the group's thread, 2 for any other.
        progress: The percentage that is done of a large operation between hosts; 0 if unknown.
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
    progress: int = 0

    @property
    def is_message(self) -> bool:
        """Return whether the operation is a send or a recv."""
        return self.kind in ("send", "recv")

    @property
    def is_blocking(self) -> bool:
        """Return whether the operation blocks its rank.

        A message may be posted long before the rank waits for it.
        """
        return not self.is_message or self.waiting_for >= 0 or self.peer < 0


def select_blocking(operations: Iterable[Operation]) -> Operation | None:
    """Return the operation that blocks a rank, of those under way; None if none does."""
    blocking = [operation for operation in operations if operation.is_blocking]
    return min(blocking, key=lambda o: (o.waiting_for < 0, o.begin, o.number), default=None)


@dataclass(frozen=True)
class Group:
    """A process group as recorded by one of its ranks.

    Attributes:
        identity: A number that is the same on all ranks of the group, and unique to it.
        name: PyTorch's name of the group.
        rank: This rank's number in the group.
        size: The world size of the group.
        members: The ranks in the job by rank in the group; empty if there were too many to record.
        sequence: The number of collectives that this rank has begun in the group.
        left_time: The time at which this rank left the group; 0 if it has not.
        left_at: The call site at which it left; empty if unknown.
        abort_reason: The reason for which this rank aborted the group; empty if it did not.
        is_assumed: Whether the members were not recorded, and may be only some of `members`.
    """

    identity: int
    name: str
    rank: int
    size: int
    members: tuple[int, ...] = ()
    sequence: int = 0
    left_time: int = 0
    left_at: str = ""
    abort_reason: str = ""
    is_assumed: bool = False

    @property
    def left(self) -> bool:
        """Return whether this rank has left the group."""
        return self.left_time > 0


@dataclass(frozen=True)
class Link:
    """The link from a rank to another host.

    Attributes:
        host: The name of the other host.
        now: The bytes that the rank has sent to it and received, and the time of the last of them.
        earlier: The same some seconds before.
    """

    host: str
    now: tuple[int, int, int]
    earlier: tuple[int, int, int]


@dataclass(frozen=True)
class Report:
    """A call of `phalanx.report`; `step` is negative and `loss` None if they were not given."""

    time: int
    step: int
    loss: float | None


@dataclass(frozen=True)
class Start:
    """The launcher's record of the start and the end of a rank.

    `code` is the exit code as in `subprocess`. `stopped` is true if the launcher had begun to stop
    the rank before its end. `error` is the exception at the end of its stderr, in one line.
    `suspended` is true if a signal such as SIGSTOP had stopped its process by then.
    """

    pid: int
    time: float
    """Unix seconds."""
    ended: float | None = None
    code: int | None = None
    stopped: bool = False
    error: str = ""
    suspended: bool = False


@dataclass(frozen=True)
class Process:
    """The kernel's view of a rank's process when the job was read.

    Attributes:
        state: "running", "sleeping", "stopped" (by a signal), "disk" (uninterruptible), "zombie",
            or "gone".
        memory: The resident memory, in bytes.
    """

    state: str
    memory: int = 0


@dataclass(frozen=True)
class Rank:
    """A rank of a job: its flight recorder, the launcher's record, and the kernel's view.

    Attributes:
        rank: The number of the rank in the job.
        pid: The pid of its process; 0 if no process left a trace.
        host: The name of its host.
        clock: Unix time minus monotonic time in nanoseconds, when the recorder was opened.
        opened: The time at which the recorder was opened; 0 if there is no recorder.
        ending: The rank's own record of its end.
        exception: The exception in one line, if `ending` is "failed". The launcher's record is
            used for a rank without a recorder.
        ended: The time of that record; 0 if there is none.
        groups: The groups in the order in which the rank formed them.
        open: The operations under way, oldest first.
        history: The ended operations, oldest first: the last few thousand, or as many as requested.
        operations: The number of operations that the rank has begun.
        reports: The calls of `phalanx.report`, oldest first: the last few hundred.
        note: The last note given to `phalanx.report`.
        start: The launcher's record; None if a Phalanx launcher did not start the rank.
        process: The state of its process; None if the process is not visible from this machine.
        main_thread_wait: The number of the operation of a group's thread that the main thread waits
            for; 0 for none.
        lone_wait: The number of the operation that the main thread waits for while no other thread
            of the process can begin one; 0 for none.
        links: The links to other hosts.
        recorded: The time up to which its records are complete; 0 if they always are.
        problem: The reason why its recorder cannot be read; empty if it can, or if there is none.
    """

    rank: int
    pid: int = 0
    host: str = ""
    clock: int = 0
    opened: int = 0
    ending: Ending = ""
    exception: str = ""
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
    main_thread_wait: int = 0
    lone_wait: int = 0
    links: tuple[Link, ...] = ()
    recorded: int = 0

    @property
    def records(self) -> tuple[Operation, ...]:
        """All known operations: those that ended, then those under way, each oldest first."""
        return self.history + self.open

    @property
    def last(self) -> Operation | None:
        """The operation that ended last; None if none has ended."""
        return max(self.history, key=lambda operation: operation.end, default=None)

    @property
    def is_gone(self) -> bool:
        """Return whether the rank's process has ended."""
        return self.process is not None and self.process.state in ("gone", "zombie")

    @property
    def logged_end(self) -> int:
        """The time at which its launcher saw its end; 0 if that is unknown."""
        ended = None if self.start is None else self.start.ended
        return max(0, int(ended * 1e9) - self.clock) if ended is not None and self.clock else 0

    @property
    def last_step(self) -> int | None:
        """The last step that the rank reported; None if there is none."""
        return next((report.step for report in reversed(self.reports) if report.step >= 0), None)

    def get_group(self, operation: Operation) -> Group | None:
        """Return the group of an operation of this rank; None if it was not recorded."""
        return self.groups[operation.group] if 0 <= operation.group < len(self.groups) else None

    def find_group(self, identity: int) -> Group | None:
        """Return the group with this identity; None if this rank did not record it."""
        return next((group for group in self.groups if group.identity == identity), None)

    def is_in(self, operation: Operation, identity: int) -> bool:
        """Return whether an operation of this rank is one of the group with this identity."""
        group = self.get_group(operation)
        return group is not None and group.identity == identity


@dataclass(frozen=True)
class Call:
    """A remote call that has been pending for a long time, as its caller or callee recorded it.

    Attributes:
        number: The number of the call, unique among the calls of its caller.
        peer: The id of the other worker: the callee in a caller's record, else the caller.
        function: The name of the function; empty in a callee's record.
        since: The time at which the call or its execution began, in monotonic nanoseconds.
    """

    number: int
    peer: int
    function: str
    since: int


@dataclass(frozen=True)
class Worker:
    """An RPC worker: its process, id and name, and the calls that it has made and executes."""

    pid: int
    id: int
    name: str
    made: tuple[Call, ...]
    executed: tuple[Call, ...]


@dataclass(frozen=True)
class ReplacedProcess:
    """A process of a rank that was lost, and whose place another process took.

    Attributes:
        rank: The number of the rank in the job.
        start: The launcher's record of the process.
    """

    rank: int
    start: Start


@dataclass(frozen=True)
class Job:
    """A job: all information in its directory.

    Attributes:
        name: The name of the job, as listed by `phalanx jobs`.
        path: The path of its directory.
        command: The command line that started it.
        started: The time at which it started, in Unix seconds.
        world_size: The number of ranks of the last attempt.
        attempt: The number of times that the ranks have been restarted, from 0.
        code: The launcher's exit code; None while the job is running, or without a launcher.
        now: The time at which the job was read, in monotonic nanoseconds.
        ranks: All ranks from 0 to `world_size` - 1, even those that left no trace.
        problems: Descriptions of data in the directory that could not be read.
        hosts: The number of hosts; the ranks here are those of one host.
        launcher: The pid of the launcher on this host; 0 if there is none.
        launcher_lost: Whether the launcher is gone without a record that the job has ended.
        other_jobs: The names of other running jobs, if this one was not selected by name.
        workers: The RPC workers among its processes, with their pending calls.
        replaced: The processes of ranks that were replaced, oldest first.
        store_host: The rank that hosts the store of a job without a launcher; -1 if unknown. It
            joins no group before all other ranks have connected to the store.
        source: What wrote the records of its ranks, if it was not Phalanx; empty if it was.
    """

    name: str
    path: str
    command: tuple[str, ...] = ()
    started: float = 0.0
    world_size: int = 0
    attempt: int = 0
    code: int | None = None
    now: int = 0
    ranks: tuple[Rank, ...] = ()
    problems: tuple[str, ...] = ()
    hosts: int = 1
    launcher: int = 0
    launcher_lost: bool = False
    other_jobs: tuple[str, ...] = ()
    workers: tuple[Worker, ...] = ()
    replaced: tuple[ReplacedProcess, ...] = ()
    store_host: int = -1
    source: str = ""

    @property
    def running(self) -> bool:
        """Return whether any process of the job on this machine is alive."""
        return any(rank.process is not None and not rank.is_gone for rank in self.ranks)

    @property
    def has_ended(self) -> bool:
        """Return whether the launcher recorded an exit code, or no process of the job is alive.

        Between two attempts no rank is alive, but the launcher is.
        """
        has_launcher = self.launcher > 0 and not self.launcher_lost
        return self.code is not None or not (has_launcher or self.running)

    def list_problems(self) -> list[str]:
        """Return the descriptions of all data of the job and its ranks that could not be read."""
        ranks = [f"rank {rank.rank}: {rank.problem}" for rank in self.ranks if rank.problem]
        return [*self.problems, *ranks]

    @cached_property
    def group_ranks(self) -> dict[int, dict[int, int]]:
        """The known ranks of each formed group by their number in it, by the group's identity.

        A rank's own record of its number takes precedence over the records of other ranks. Only a
        formed group has an identity.
        """
        found: dict[int, dict[int, int]] = {}
        numbers = {rank.rank for rank in self.ranks}
        formed = [(rank, group) for rank in self.ranks for group in rank.groups if group.identity]
        for rank, group in formed:
            found.setdefault(group.identity, {}).setdefault(group.rank, rank.rank)
        for _, group in formed:
            whole = sorted(numbers) if group.size == len(numbers) else ()
            for place, number in enumerate(group.members or whole):
                if number in numbers:
                    found[group.identity].setdefault(place, number)
        return found

    def find_rank(self, rank: Rank, operation: Operation, place: int) -> int:
        """Return the rank with a number in the group of a rank's operation; -1 if unknown."""
        group = rank.get_group(operation)
        if group is None or place < 0:
            return -1
        if not group.identity:  # while it is formed, only its own record identifies it
            return group.members[place] if place < len(group.members) else -1
        return self.group_ranks[group.identity].get(place, -1)
