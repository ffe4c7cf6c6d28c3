"""A rank's operations as tracks of a timeline: what `trace` writes, apart from the file's format.

Slices of a track never overlap. Messages of a rank do, and so may operations of several groups or
of several threads of the script: they get as many tracks of the same name as are needed, which
viewers draw as one. Times that can't be right, as in a damaged black box, are left out and counted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.observe.culprit.endings import End, end_of, last_sign, signal_name
from phalanx.observe.culprit.waits import group_of
from phalanx.observe.escape import escape
from phalanx.observe.shares import Members, in_job, over, wait

if TYPE_CHECKING:
    from phalanx.observe.model import Job, Operation, Rank

__all__ = ["Counter", "Instant", "Lane", "Slice", "Timeline", "latest", "timeline"]

WAITING = "waiting"
"""The category of the part of an operation in which it waited for peers."""

_GROUPS_THREAD = 1
"""As black boxes number threads; 0 is the process's main one, all others are the script's too."""

_SLACK = 60 * 10**9
"""Nanoseconds after the reading that a time may lie and still be believed."""

Value = str | int


@dataclass(frozen=True)
class Slice:
    """An operation, or the waiting within it.

    Attributes:
        name: What is written on it.
        category: "collective", "message", "joining" or "waiting".
        begin: Nanoseconds of the monotonic clock.
        end: The same; None if it was under way when the job was read, or when its rank died.
        arguments: What a click shows.
        within: The waiting within it; empty, or one slice.
        flow: Shared by the slices of one collective on all ranks; 0: none.
    """

    name: str
    category: str
    begin: int
    end: int | None
    arguments: Mapping[str, Value]
    within: tuple[Slice, ...] = ()
    flow: int = 0


@dataclass(frozen=True)
class Lane:
    """Slices that follow each other."""

    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True)
class Counter:
    """A figure over time: (nanoseconds, value)."""

    name: str
    values: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Instant:
    """Something that happened to a rank."""

    name: str
    time: int
    arguments: Mapping[str, Value]


@dataclass(frozen=True)
class Timeline:
    """All of one rank.

    Attributes:
        rank: Its number in the job.
        pid: Its process; 0 if it left no trace.
        lanes: The main thread's first, then the script's other threads', the groups', messages.
        counters: Step and loss as `phalanx.report` was told.
        instants: How it ended, and from when on its operations are known.
        earlier: How many of its operations are too old for its black box to have kept.
        impossible: How many operations were left out because their times can't be right.
    """

    rank: int
    pid: int
    lanes: tuple[Lane, ...]
    counters: tuple[Counter, ...]
    instants: tuple[Instant, ...]
    earlier: int
    impossible: int

    @property
    def slices(self) -> int:
        """How many operations are on it."""
        return sum(len(lane.slices) for lane in self.lanes)


def latest(job: Job) -> int:
    """Where the timeline of a job ends: now if it runs, else when the last of its ranks ended."""
    if job.running:
        return job.now
    signs = [max(last_sign(rank), end_of(rank, job).time) for rank in job.ranks]
    believed = [time for time in signs if time <= job.now + _SLACK]
    return max(believed, default=job.now)


def timeline(rank: Rank, job: Job, known: Members) -> Timeline:
    """Arrange the operations of one rank of a job; `known` is of `waits.members`."""
    end = end_of(rank, job)
    lanes: dict[tuple[int, str], list[Operation]] = {}
    impossible = 0
    for operation in (*rank.history, *rank.open):
        if _possible(operation, job.now + _SLACK):
            lanes.setdefault(_lane(rank, operation), []).append(operation)
        else:
            impossible += 1
    last = end.time if over(end) and 0 < end.time <= job.now + _SLACK else None
    tracks: list[Lane] = []
    for (_, name), operations in sorted(lanes.items()):
        tracks += [
            Lane(name, [_slice(rank, one, known, last, job.now) for one in row])
            for row in _apart(operations)
        ]
    return Timeline(
        rank=rank.rank,
        pid=rank.pid,
        lanes=tuple(tracks),
        counters=_counters(rank, job.now + _SLACK),
        instants=tuple(one for one in _instants(rank, end) if 0 < one.time <= job.now + _SLACK),
        earlier=max(rank.operations - len(rank.history) - len(rank.open), 0),
        impossible=impossible,
    )


def _possible(operation: Operation, limit: int) -> bool:
    if not 0 < operation.begin <= limit:
        return False
    return operation.end == 0 or operation.begin <= operation.end <= limit


def _lane(rank: Rank, operation: Operation) -> tuple[int, str]:
    """What kind of track an operation goes to: its place among them, and its name."""
    if operation.is_message:
        return 3, "messages"
    if operation.thread != _GROUPS_THREAD:
        return (1, "other threads") if operation.thread else (0, "caller's thread")
    name = _group_name(rank, operation)
    return 2, f"group's thread: {name}" if name and len(rank.groups) > 1 else "group's thread"


def _group_name(rank: Rank, operation: Operation) -> str:
    group = group_of(rank, operation)
    return "" if group is None else escape(group.name)


def _apart(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Spread operations over as few rows as do, so that none overlaps another in its row."""
    rows: list[list[Operation]] = []
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for operation in sorted(operations, key=lambda one: (one.begin, one.end or math.inf)):
        while busy and busy[0][0] <= operation.begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, len(rows))
            rows.append([])
        row = heapq.heappop(free)
        rows[row].append(operation)
        heapq.heappush(busy, (operation.end or math.inf, row))
    return rows


def _slice(rank: Rank, operation: Operation, known: Members, last: int | None, now: int) -> Slice:
    """Draw an operation; one under way ends with its rank, at `last`."""
    end = operation.end or (None if last is None else max(last, operation.begin))
    failed = operation.outcome not in ("", "ok")
    name = escape(operation.kind, 40)
    return Slice(
        name=f"{name}: {escape(operation.outcome, 40)}" if failed else name,
        category=_category(operation),
        begin=operation.begin,
        end=end,
        arguments=_arguments(rank, operation, known),
        within=_waiting(rank, operation, known, end, now),
        flow=_flow(rank, operation),
    )


def _category(operation: Operation) -> str:
    if operation.is_message:
        return "message"
    return "joining" if operation.kind == "join" else "collective"


def _waiting(
    rank: Rank, operation: Operation, known: Members, end: int | None, now: int
) -> tuple[Slice, ...]:
    still = not operation.end and operation.waiting_for >= 0
    begin, until = wait(operation, end or now)
    if not still and until <= begin:
        return ()
    who = in_job(rank, operation, operation.waiting_for, known)
    name = f"waiting for rank {who}" if who >= 0 else "waiting"
    return (Slice(name, WAITING, begin, end if still else until, {}),)


def _arguments(rank: Rank, operation: Operation, known: Members) -> dict[str, Value]:
    partner = "peer" if operation.is_message else "root"
    found: dict[str, Value] = {
        "operation": operation.number,
        "group": _group_name(rank, operation),
        "tag" if operation.is_message else "sequence": operation.sequence,
        "dtype": escape(operation.dtype, 40),
        "elements": operation.count if operation.dtype else "",
        "op": escape(operation.op, 40),
        partner: in_job(rank, operation, operation.peer, known) if operation.peer >= 0 else "",
        "call site": escape(operation.site),
        "outcome": escape(operation.outcome, 40) if operation.end else "under way",
        "waited ns": operation.waited,
    }
    return {name: _fitting(value) for name, value in found.items() if value != ""}


def _fitting(value: Value) -> Value:
    return value if isinstance(value, str) or abs(value) < 1 << 63 else str(value)


def _flow(rank: Rank, operation: Operation) -> int:
    """A number that the ranks of a collective share, and no other operation; 0 for a message."""
    group = group_of(rank, operation)
    if group is None or operation.is_message or operation.sequence <= 0:
        return 0
    return (group.identity * 0x9E3779B97F4A7C15 + operation.sequence) % 2**64


def _counters(rank: Rank, limit: int) -> tuple[Counter, ...]:
    reports = [report for report in rank.reports if 0 < report.time <= limit]
    steps = [(report.time, float(report.step)) for report in reports if report.step >= 0]
    losses = [
        (report.time, report.loss)
        for report in reports
        if report.loss is not None and math.isfinite(report.loss)
    ]
    found = (Counter("step", steps), Counter("loss", losses))
    return tuple(counter for counter in found if counter.values)


def _instants(rank: Rank, end: End) -> Iterator[Instant]:
    yield Instant("black box opened", rank.opened, {"pid": rank.pid, "host": escape(rank.host)})
    if over(end):
        words: dict[str, Value] = {"pid": rank.pid, "last words": escape(rank.last_words, 1000)}
        yield Instant(_ending(end), end.time or last_sign(rank), words)


def _ending(end: End) -> str:
    if end.how == "killed" and end.code is not None:
        return f"killed by {signal_name(-end.code)}"
    if end.how == "exited":
        return f"exited with code {end.code}"
    words = {"well": "ended", "launcher": "stopped by its launcher", "vanished": "gone"}
    return words.get(end.how, end.how)
