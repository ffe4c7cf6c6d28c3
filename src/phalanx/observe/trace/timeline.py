"""The tracks of a timeline with the operations of a rank, independent of the file format.

Slices of a track never overlap. Messages of a rank may overlap, as may operations of several groups
or of several threads of the script. They are spread over as many tracks of the same name as needed,
which viewers draw as one. Operations with impossible times, as in a damaged flight recorder, are
omitted and counted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.exit_reasons import ExitStatus, determine_exit, get_last_record_time
from phalanx.observe.diagnosis.wait_for_graph import get_group
from phalanx.observe.escape import escape
from phalanx.observe.wait_time import GroupRanks, get_global_rank, get_wait_interval, is_inactive
from phalanx.system.signals import signal_name

if TYPE_CHECKING:
    from phalanx.observe.model import Job, Operation, Rank

__all__ = ["Counter", "Instant", "Slice", "Timeline", "Track", "build_timeline", "find_end"]

WAITING = "waiting"
"""The category of slices that show an operation's wait for peers."""

_GROUP_THREAD = 1
"""The number of a group's thread in a recorder; all other numbers are threads of the script."""

_SLACK = 60 * 10**9
"""Nanoseconds by which a plausible time may be later than the reading of the job."""

Value = str | int


@dataclass(frozen=True)
class Slice:
    """An operation, or the wait within an operation.

    Attributes:
        name: The label of the slice.
        category: "collective", "message", "joining" or "waiting".
        begin: The begin, in nanoseconds of the monotonic clock.
        end: The end, likewise; None if it is under way, and no end of its rank is known.
        arguments: The details that a viewer shows on selection.
        within: The wait within the operation: empty, or one slice.
        flow: An id that the slices of one collective share on all ranks; 0 for none.
    """

    name: str
    category: str
    begin: int
    end: int | None
    arguments: Mapping[str, Value]
    within: tuple[Slice, ...] = ()
    flow: int = 0


@dataclass(frozen=True)
class Track:
    """A track: slices in order that do not overlap."""

    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True)
class Counter:
    """A quantity over time, as pairs of time in nanoseconds and value."""

    name: str
    values: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Instant:
    """An event of a rank at a point in time."""

    name: str
    time: int
    arguments: Mapping[str, Value]


@dataclass(frozen=True)
class Timeline:
    """The timeline of one rank.

    Attributes:
        rank: The number of the rank in the job.
        pid: The pid of its process; 0 if it left no trace.
        tracks: The tracks: the main thread, other threads of the script, groups' threads, messages.
        counters: The steps and losses given to `phalanx.report`.
        instants: The opening of its flight recorder, and its end.
        earlier: The number of operations that its flight recorder no longer holds.
        impossible: The number of operations omitted because their times are impossible.
    """

    rank: int
    pid: int
    tracks: tuple[Track, ...]
    counters: tuple[Counter, ...]
    instants: tuple[Instant, ...]
    earlier: int
    impossible: int

    @property
    def slices(self) -> int:
        """The number of operations on the timeline."""
        return sum(len(track.slices) for track in self.tracks)


def find_end(job: Job) -> int:
    """Return the end of a job's timeline: now if it is running, else the end of its last rank."""
    if job.running:
        return job.now
    signs = [max(get_last_record_time(rank), determine_exit(rank, job).time) for rank in job.ranks]
    believed = [time for time in signs if time <= job.now + _SLACK]
    return max(believed, default=job.now)


def build_timeline(rank: Rank, job: Job, group_ranks: GroupRanks) -> Timeline:
    """Arrange the operations of one rank of a job; `group_ranks` is from `map_group_ranks`."""
    status = determine_exit(rank, job)
    operations_by_track: dict[tuple[int, str], list[Operation]] = {}
    impossible = 0
    for operation in (*rank.history, *rank.open):
        if _is_possible(operation, job.now + _SLACK):
            operations_by_track.setdefault(_identify_track(rank, operation), []).append(operation)
        else:
            impossible += 1
    last = status.time if is_inactive(status) and 0 < status.time <= job.now + _SLACK else None
    tracks: list[Track] = []
    for (_, name), operations in sorted(operations_by_track.items()):
        tracks += [
            Track(name, [_build_slice(rank, one, group_ranks, last, job.now) for one in row])
            for row in _split_overlapping(operations)
        ]
    return Timeline(
        rank=rank.rank,
        pid=rank.pid,
        tracks=tuple(tracks),
        counters=_build_counters(rank, job.now + _SLACK),
        instants=tuple(
            one for one in _list_instants(rank, status) if 0 < one.time <= job.now + _SLACK
        ),
        earlier=max(rank.operations - len(rank.history) - len(rank.open), 0),
        impossible=impossible,
    )


def _is_possible(operation: Operation, limit: int) -> bool:
    if not 0 < operation.begin <= limit:
        return False
    return operation.end == 0 or operation.begin <= operation.end <= limit


def _identify_track(rank: Rank, operation: Operation) -> tuple[int, str]:
    """Return the position and the name of the track for an operation."""
    if operation.is_message:
        return 3, "messages"
    if operation.thread != _GROUP_THREAD:
        return (1, "other threads") if operation.thread else (0, "caller's thread")
    name = _get_group_name(rank, operation)
    return 2, f"group's thread: {name}" if name and len(rank.groups) > 1 else "group's thread"


def _get_group_name(rank: Rank, operation: Operation) -> str:
    group = get_group(rank, operation)
    return "" if group is None else escape(group.name)


def _split_overlapping(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Spread operations over the minimum number of rows in which none of them overlap."""
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


def _build_slice(
    rank: Rank, operation: Operation, group_ranks: GroupRanks, last: int | None, now: int
) -> Slice:
    """Build the slice of an operation; an operation under way ends with its rank, at `last`."""
    end = operation.end or (None if last is None else max(last, operation.begin))
    failed = operation.outcome not in ("", "ok")
    name = escape(operation.kind, 40)
    return Slice(
        name=f"{name}: {escape(operation.outcome, 40)}" if failed else name,
        category=_get_category(operation),
        begin=operation.begin,
        end=end,
        arguments=_list_arguments(rank, operation, group_ranks),
        within=_build_wait(rank, operation, group_ranks, end, now),
        flow=_get_flow(rank, operation),
    )


def _get_category(operation: Operation) -> str:
    if operation.is_message:
        return "message"
    return "joining" if operation.kind == "join" else "collective"


def _build_wait(
    rank: Rank, operation: Operation, group_ranks: GroupRanks, end: int | None, now: int
) -> tuple[Slice, ...]:
    still = not operation.end and operation.waiting_for >= 0
    begin, until = get_wait_interval(operation, end or now)
    if not still and until <= begin:
        return ()
    peer = get_global_rank(rank, operation, operation.waiting_for, group_ranks)
    name = f"waiting for rank {peer}" if peer >= 0 else "waiting"
    return (Slice(name, WAITING, begin, end if still else until, {}),)


def _list_arguments(rank: Rank, operation: Operation, group_ranks: GroupRanks) -> dict[str, Value]:
    partner = "peer" if operation.is_message else "root"
    found: dict[str, Value] = {
        "operation": operation.number,
        "group": _get_group_name(rank, operation),
        "tag" if operation.is_message else "sequence": operation.sequence,
        "dtype": escape(operation.dtype, 40),
        "elements": operation.count if operation.dtype else "",
        "op": escape(operation.op, 40),
        partner: get_global_rank(rank, operation, operation.peer, group_ranks)
        if operation.peer >= 0
        else "",
        "call site": escape(operation.site),
        "outcome": escape(operation.outcome, 40) if operation.end else "under way",
        "waited ns": operation.waited,
    }
    return {name: _fit_value(value) for name, value in found.items() if value != ""}


def _fit_value(value: Value) -> Value:
    return value if isinstance(value, str) or abs(value) < 1 << 63 else str(value)


def _get_flow(rank: Rank, operation: Operation) -> int:
    """Return an id for a collective that is equal on all of its ranks; 0 for a message."""
    group = get_group(rank, operation)
    if group is None or operation.is_message or operation.sequence <= 0:
        return 0
    return (group.identity * 0x9E3779B97F4A7C15 + operation.sequence) % 2**64


def _build_counters(rank: Rank, limit: int) -> tuple[Counter, ...]:
    reports = [report for report in rank.reports if 0 < report.time <= limit]
    steps = [(report.time, float(report.step)) for report in reports if report.step >= 0]
    losses = [
        (report.time, report.loss)
        for report in reports
        if report.loss is not None and math.isfinite(report.loss)
    ]
    found = (Counter("step", steps), Counter("loss", losses))
    return tuple(counter for counter in found if counter.values)


def _list_instants(rank: Rank, status: ExitStatus) -> Iterator[Instant]:
    yield Instant(
        "flight recorder opened", rank.opened, {"pid": rank.pid, "host": escape(rank.host)}
    )
    if is_inactive(status):
        arguments: dict[str, Value] = {"pid": rank.pid, "exception": escape(rank.exception, 1000)}
        yield Instant(_describe_exit(status), status.time or get_last_record_time(rank), arguments)


def _describe_exit(status: ExitStatus) -> str:
    if status.reason == "killed" and status.code is not None:
        return f"killed by {signal_name(-status.code)}"
    if status.reason == "exited":
        return f"exited with code {status.code}"
    labels = {
        "completed": "ended",
        "launcher": "stopped by its launcher",
        "vanished": "disappeared",
    }
    return labels.get(status.reason, status.reason)
