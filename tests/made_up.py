"""Jobs that are made up: `Story` tells what ranks do one after another, `job()` is what is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from phalanx.observe.model import Ending, Group, Job, Operation, Process, Rank, Report, Start

SECOND = 1_000_000_000
CLOCK = 1_795_000_000 * SECOND
"""Unix time minus monotonic time in all stories."""


@dataclass
class Character:
    """One rank of a story."""

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
    began: int = 0


class Story:
    """A job of `size` ranks, which have formed `groups` (of all ranks, if none are given)."""

    def __init__(
        self,
        size: int,
        groups: dict[str, Sequence[int]] | None = None,
        *,
        launched: bool = True,
        joined: Iterable[int] | None = None,
    ) -> None:
        self.time = 1000 * SECOND
        self.ranks = [Character(number, 800 + number) for number in range(size)]
        self.code: int | None = None
        self.names = list(groups or {"0": range(size)})
        for rank in self.ranks:
            if launched:
                rank.start = Start(rank.pid, 0, self.unix)
            if joined is None or rank.rank in joined:
                rank.opened = self.time
        for identity, (name, members) in enumerate((groups or {"0": range(size)}).items(), 1):
            for place, number in enumerate(members):
                if self.ranks[number].opened:
                    note = Group(identity, name, place, len(members), tuple(members))
                    self.ranks[number].groups.append(note)

    @property
    def unix(self) -> float:
        return (self.time + CLOCK) / SECOND

    def passes(self, seconds: float) -> Story:
        self.time += int(seconds * SECOND)
        return self

    # What ranks do.

    def begins(
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
    ) -> Story:
        """Ranks enter an operation. Of a message, `peer` is a rank of the job."""
        for number in [ranks] if isinstance(ranks, int) else ranks:
            rank = self.ranks[number]
            index = [note.name for note in rank.groups].index(group or self.names[0])
            note = rank.groups[index]
            message = kind in ("send", "recv")
            if not message and kind != "join":
                rank.groups[index] = note = replace(note, sequence=note.sequence + 1)
            place = note.members.index(peer) if message and peer >= 0 else peer
            wait = place if message and waiting_for == -1 else waiting_for
            rank.began += 1
            rank.open.append(
                Operation(
                    number=rank.began,
                    kind=kind,
                    group=index,
                    sequence=tag if message else note.sequence,
                    dtype="" if kind in ("barrier", "join") else dtype,
                    count=count,
                    op="SUM" if kind == "all_reduce" else "",
                    peer=place,
                    site=site,
                    begin=self.time,
                    waiting_for=wait,
                    thread=thread,
                )
            )
        return self

    def ends(self, ranks: Iterable[int] | int | None = None, outcome: str = "ok") -> Story:
        """What these ranks (None: all) are in comes to its end."""
        chosen = range(len(self.ranks)) if ranks is None else ranks
        for number in [chosen] if isinstance(chosen, int) else chosen:
            rank = self.ranks[number]
            rank.history += [replace(o, end=self.time, outcome=outcome) for o in rank.open]
            rank.open = []
        return self

    def together(self, count: int = 1, group: str | None = None, **kwargs: object) -> Story:
        """All members of a group do operations that go well."""
        members = self.members(group)
        for _ in range(count):
            self.begins(members, group=group, **kwargs).passes(0.001)  # type: ignore[arg-type]
            self.ends(members).passes(0.001)
        return self

    def members(self, group: str | None = None) -> list[int]:
        name = group or self.names[0]
        return [r.rank for r in self.ranks if any(note.name == name for note in r.groups)]

    def reports(self, ranks: Iterable[int], step: int) -> Story:
        for number in ranks:
            self.ranks[number].reports.append(Report(self.time, step, None))
        return self

    def runs(self, rank: int) -> Story:
        self.ranks[rank].state = "running"
        return self

    def is_stopped(self, rank: int) -> Story:
        self.ranks[rank].state = "stopped"
        return self

    # How ranks end.

    def fails(self, ranks: Iterable[int] | int, words: str, code: int | None = 1) -> Story:
        for number in [ranks] if isinstance(ranks, int) else ranks:
            rank = self.ranks[number]
            rank.ending, rank.exception, rank.ended = "failed", words, self.time
            self.dies(number, code)
        return self

    def leaves(self, rank: int, group: str | None = None, why: str = "") -> Story:
        own = self.ranks[rank]
        for index, note in enumerate(own.groups):
            if note.name == (group or self.names[0]):
                site = "/srv/job/train.py:77"
                own.groups[index] = replace(note, left=True, left_at=site, why=why)
        return self

    def exits(self, rank: int) -> Story:
        """The script comes to its end."""
        self.ranks[rank].ending, self.ranks[rank].ended = "exited", self.time
        return self.dies(rank, 0)

    def dies(self, rank: int, code: int | None = None, *, stopped: bool = False) -> Story:
        own = self.ranks[rank]
        own.state = "gone"
        if own.start is not None:
            own.start = replace(own.start, ended=self.unix, code=code, stopped=stopped)
        return self

    def launcher_stops(self, code: int = 1, signal: int = 15) -> Story:
        """The launcher ends all ranks that are left, and itself."""
        for rank in self.ranks:
            if rank.state != "gone":
                self.dies(rank.rank, -signal, stopped=True)
        self.code = code
        return self

    # What is read of it.

    def job(self) -> Job:
        return Job(
            name="20261121-0901-k3f9x2",
            path="/tmp/phalanx-1000/20261121-0901-k3f9x2",
            command=("python", "train.py"),
            started=1_795_001_000.0,
            world_size=len(self.ranks),
            code=self.code,
            now=self.time,
            ranks=tuple(self._rank(rank) for rank in self.ranks),
        )

    def _rank(self, rank: Character) -> Rank:
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
            operations=rank.began if opened else 0,
            reports=tuple(rank.reports) if opened else (),
            start=rank.start,
            process=Process(rank.state, 1.0, 1 << 20),
            problem=rank.problem,
        )
