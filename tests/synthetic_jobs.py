"""Synthetic jobs for tests of the readers of flight recorders.

The functions build ranks from operations: `NOW` is the time of the reading, and times are given in
seconds before it. `JobBuilder` simulates the actions of ranks, and `build` returns the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.diagnosis.model import Ending, Group, Job, Operation, Process, Rank, Report, Start

SECOND = 1_000_000_000
NOW = 5_000 * SECOND
CLOCK = 1_795_000_000 * SECOND
"""Unix time minus monotonic time in all jobs."""
NAME = "20261121-0901-k3f9x2"
WORLD = 0xABCDEF0123


def ago(seconds: float) -> int:
    """Return the time `seconds` before `NOW`."""
    return NOW - round(seconds * SECOND)


def world(rank: int, size: int) -> Group:
    """Return the group of all ranks as one of them recorded it."""
    return Group(WORLD, "default", rank, size, tuple(range(size)), 40)


def collective(
    begin: float, end: float | None, waited: float = 0.0, waiting_for: int = -1, **more: Any
) -> Operation:
    """Return an all_reduce from `begin` to `end` seconds ago; under way if `end` is None."""
    sequence = more.pop("sequence", 41)
    return Operation(
        number=more.pop("number", sequence),
        kind=more.pop("kind", "all_reduce"),
        group=more.pop("group", 0),
        sequence=sequence,
        dtype="float32",
        count=1024,
        op="SUM",
        site=more.pop("site", "/srv/code/train.py:40"),
        begin=ago(begin),
        end=0 if end is None else ago(end),
        waited=round(waited * SECOND),
        waiting_for=waiting_for,
        **more,
    )


def message(
    begin: float, end: float | None, waited: float = 0.0, waiting_for: int = -1, **more: Any
) -> Operation:
    """Return a recv from rank 1, or a send, with tag 7."""
    more = {"kind": "recv", "peer": 1, "sequence": 7, **more}
    return replace(collective(begin, end, waited, waiting_for, **more), op="")


def rank(
    number: int,
    size: int = 2,
    history: Sequence[Operation] = (),
    open: Sequence[Operation] = (),  # noqa: A002
    state: str | None = "running",
    **more: Any,
) -> Rank:
    """Return a rank that has run for 60 s."""
    given: dict[str, Any] = {
        "pid": 4000 + number,
        "host": "node-a",
        "clock": CLOCK,
        "opened": ago(60),
        "groups": (world(number, size),),
        "operations": len(history) + len(open),
        "process": None if state is None else Process(state, 300 * 2**20),
    }
    given.update(more)
    return Rank(number, history=tuple(history), open=tuple(open), **given)


def job(*ranks: Rank, **more: Any) -> Job:
    """Return a job of these ranks, which is running unless their processes are gone."""
    given: dict[str, Any] = {
        "command": ("python", "train.py"),
        "started": (CLOCK + ago(60)) / SECOND,
        "world_size": len(ranks),
        "now": NOW,
    }
    given.update(more)
    return Job(NAME, f"/tmp/phalanx-0/{NAME}", ranks=ranks, **given)


def build_straggling_job(size: int, slow: int, share: float = 0.6) -> Job:
    """Return a job of 2 steps per second in which all ranks wait for `slow` for this share."""
    return job(*(_build_straggling_rank(number, size, slow, share) for number in range(size)))


def _build_straggling_rank(number: int, size: int, slow: int, share: float) -> Rank:
    history = []
    for sequence in range(1, 21):
        end = 0.5 * (20 - sequence)
        waited = 0.0 if number == slow else 0.5 * share
        waiting_for = -1 if number == slow else slow
        history.append(collective(end + waited + 0.01, end, waited, waiting_for, sequence=sequence))
    reports = [Report(ago(0.5 * (20 - step)), step, 2.0 / step) for step in range(1, 21)]
    return rank(number, size, history, reports=tuple(reports))


@dataclass
class RankState:
    """The state of one rank of a job."""

    rank: int
    pid: int
    groups: list[Group] = field(default_factory=list)
    open: list[Operation] = field(default_factory=list)
    history: list[Operation] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    opened: int = 0
    ending: Ending = ""
    exception: str = ""
    ended: int = 0
    state: str = "sleeping"
    start: Start | None = None
    problem: str = ""
    num_operations: int = 0


class JobBuilder:
    """A builder of a job of `size` ranks, which have formed `groups` (default: one)."""

    def __init__(
        self,
        size: int,
        groups: dict[str, Sequence[int]] | None = None,
        *,
        launched: bool = True,
        joined: Iterable[int] | None = None,
    ) -> None:
        self.time = 1000 * SECOND
        self.ranks = [RankState(number, 800 + number) for number in range(size)]
        self.code: int | None = None
        self.names = list(groups or {"0": range(size)})
        for rank in self.ranks:
            if launched:
                rank.start = Start(rank.pid, self.unix)
            if joined is None or rank.rank in joined:
                rank.opened = self.time
        for identity, (name, members) in enumerate((groups or {"0": range(size)}).items(), 1):
            for position, number in enumerate(members):
                if self.ranks[number].opened:
                    group_record = Group(identity, name, position, len(members), tuple(members))
                    self.ranks[number].groups.append(group_record)

    @property
    def unix(self) -> float:
        return (self.time + CLOCK) / SECOND

    def advance(self, seconds: float) -> JobBuilder:
        self.time += int(seconds * SECOND)
        return self

    # Actions of ranks.

    def begin(
        self,
        ranks: Iterable[int] | int,
        kind: str = "all_reduce",
        group: str | None = None,
        *,
        site: str = "/srv/job/train.py:40",
        dtype: str = "float32",
        count: int = 10,
        peer: int = -1,
        tag: int = 0,
        waiting_for: int = -1,
        thread: int = 0,
    ) -> JobBuilder:
        """Let ranks begin an operation; the `peer` of a message is a rank of the job."""
        for number in [ranks] if isinstance(ranks, int) else ranks:
            rank = self.ranks[number]
            index = [group_record.name for group_record in rank.groups].index(
                group or self.names[0]
            )
            group_record = rank.groups[index]
            message = kind in ("send", "recv")
            if not message and kind != "join":
                rank.groups[index] = group_record = replace(
                    group_record, sequence=group_record.sequence + 1
                )
            position = group_record.members.index(peer) if message and peer >= 0 else peer
            wait = position if message and waiting_for == -1 else waiting_for
            rank.num_operations += 1
            rank.open.append(
                Operation(
                    number=rank.num_operations,
                    kind=kind,
                    group=index,
                    sequence=tag if message else group_record.sequence,
                    dtype="" if kind in ("barrier", "join") else dtype,
                    count=count,
                    op="SUM" if kind == "all_reduce" else "",
                    peer=position,
                    site=site,
                    begin=self.time,
                    waiting_for=wait,
                    thread=thread,
                )
            )
        return self

    def end(self, ranks: Iterable[int] | int | None = None, outcome: str = "ok") -> JobBuilder:
        """End the operations of these ranks, or of all ranks."""
        chosen = range(len(self.ranks)) if ranks is None else ranks
        for number in [chosen] if isinstance(chosen, int) else chosen:
            rank = self.ranks[number]
            rank.history += [replace(o, end=self.time, outcome=outcome) for o in rank.open]
            rank.open = []
        return self

    def run_collectives(
        self, count: int = 1, group: str | None = None, **kwargs: object
    ) -> JobBuilder:
        """Let all members of a group complete operations."""
        members = self.get_members(group)
        for _ in range(count):
            self.begin(members, group=group, **kwargs).advance(0.001)  # type: ignore[arg-type]
            self.end(members).advance(0.001)
        return self

    def get_members(self, group: str | None = None) -> list[int]:
        name = group or self.names[0]
        return [
            r.rank
            for r in self.ranks
            if any(group_record.name == name for group_record in r.groups)
        ]

    def report(self, ranks: Iterable[int], step: int) -> JobBuilder:
        for number in ranks:
            self.ranks[number].reports.append(Report(self.time, step, None))
        return self

    def set_running(self, rank: int) -> JobBuilder:
        self.ranks[rank].state = "running"
        return self

    def stop_rank(self, rank: int) -> JobBuilder:
        self.ranks[rank].state = "stopped"
        return self

    # Ends of ranks.

    def fail(self, ranks: Iterable[int] | int, exception: str, code: int | None = 1) -> JobBuilder:
        for number in [ranks] if isinstance(ranks, int) else ranks:
            rank = self.ranks[number]
            rank.ending, rank.exception, rank.ended = "failed", exception, self.time
            self.end_process(number, code)
        return self

    def leave(self, rank: int, group: str | None = None, abort_reason: str = "") -> JobBuilder:
        own = self.ranks[rank]
        for index, group_record in enumerate(own.groups):
            if group_record.name == (group or self.names[0]):
                site = "/srv/job/train.py:77"
                own.groups[index] = replace(
                    group_record, left_time=self.time, left_at=site, abort_reason=abort_reason
                )
        return self

    def exit(self, rank: int) -> JobBuilder:
        """Complete the script of a rank."""
        self.ranks[rank].ending, self.ranks[rank].ended = "exited", self.time
        return self.end_process(rank, 0)

    def end_process(
        self, rank: int, code: int | None = None, *, stopped: bool = False
    ) -> JobBuilder:
        own = self.ranks[rank]
        if own.start is not None:
            suspended = stopped and own.state == "stopped"
            own.start = replace(
                own.start, ended=self.unix, code=code, stopped=stopped, suspended=suspended
            )
        own.state = "gone"
        return self

    def stop_job(self, code: int = 1, signal: int = 15) -> JobBuilder:
        """Let the launcher stop all remaining ranks and end."""
        for rank in self.ranks:
            if rank.state != "gone":
                self.end_process(rank.rank, -signal, stopped=True)
        self.code = code
        return self

    # The result.

    def build(self) -> Job:
        return Job(
            name=NAME,
            path=f"/tmp/phalanx-1000/{NAME}",
            command=("python", "train.py"),
            started=1_795_001_000.0,
            world_size=len(self.ranks),
            code=self.code,
            now=self.time,
            ranks=tuple(self._rank(rank) for rank in self.ranks),
        )

    def _rank(self, rank: RankState) -> Rank:
        opened = rank.opened and not rank.problem
        return Rank(
            rank=rank.rank,
            pid=rank.pid,
            host="node-a" if rank.opened else "",
            clock=CLOCK if opened else 0,
            opened=rank.opened if opened else 0,
            ending=rank.ending if opened else "",
            exception=rank.exception if opened else "",
            ended=rank.ended if opened else 0,
            groups=tuple(rank.groups) if opened else (),
            open=tuple(rank.open) if opened else (),
            history=tuple(rank.history) if opened else (),
            operations=rank.num_operations if opened else 0,
            reports=tuple(rank.reports) if opened else (),
            start=rank.start,
            process=Process(rank.state, 1 << 20),
            problem=rank.problem,
        )
