"""A timeline of all ranks of a job: the file that `phalanx trace` writes, for ui.perfetto.dev.

The operations of a rank are slices on tracks. Slices of a track never overlap. Messages of a rank
may overlap, as may operations of several groups or of several threads of the script. They are
spread over as many tracks of the same name as needed, which viewers draw as one. Operations with
impossible times, as in a damaged flight recorder, are omitted and counted.

The format is Perfetto's TrackEvent in protobuf, written with Perfetto's Python package (the extra
"trace"). Each rank is a process in the trace, and a packet sequence with interned strings, so that
each text is written once. Times are those of the host's monotonic clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from phalanx.diagnosis.exit_reasons import determine_exit, get_clock_offset, get_last_record_time
from phalanx.diagnosis.wait_time import get_wait_interval
from phalanx.system.escape import escape
from phalanx.system.extras import install_command
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from phalanx.diagnosis.exit_reasons import ExitStatus
    from phalanx.diagnosis.model import Job, Operation, Rank

_GROUP_THREAD = 1
"""The number of a group's thread in a recorder; all other numbers are threads of the script."""

_SLACK = 60 * 10**9
"""Nanoseconds by which a plausible time may be later than the reading of the job."""

_LATEST = 1 << 62
"""An upper limit for valid clock values, in nanoseconds."""
_FIRST_SUBSTITUTE_PID = 1 << 30
"""The first of the process numbers for ranks without a unique pid; no pid is this large."""

_Value = str | int


@dataclass(frozen=True)
class OperationCounts:
    """The numbers of a rank's operations that were written or omitted.

    Attributes:
        rank: The number of the rank in the job.
        operations: The number of operations on the timeline.
        earlier: The number of operations that its flight recorder no longer holds.
        impossible: The number of operations omitted because their times are impossible.
    """

    rank: int
    operations: int
    earlier: int
    impossible: int


def check() -> None:
    """Check that Perfetto's package can be imported.

    Raises:
        UsageError: It is missing, or its protobuf is too old; the message says what to install.
    """
    try:
        import perfetto.trace_builder.proto_builder  # noqa: F401
    except Exception as error:
        # Its generated code rejects a protobuf that is too old by errors of other types.
        command = install_command("trace", upgrade=not isinstance(error, ModuleNotFoundError))
        raise UsageError(
            f"phalanx trace needs Perfetto's Python package, which cannot be imported ({error}): "
            f"install it with {command}"
        ) from error


def write(job: Job, file: IO[bytes]) -> Iterator[OperationCounts]:
    """Write the timeline of a job, one rank for each step of the iterator.

    Args:
        job: The job, read with its whole history.
        file: A binary file, which is written sequentially.

    Raises:
        UsageError: Perfetto's package cannot be imported.
        OSError: The file cannot be written.
    """
    check()
    file.write(_build_job_packets(job))
    limit = job.now + _SLACK
    for number, (rank, pid) in enumerate(zip(job.ranks, _assign_pids(job), strict=True)):
        possible = [operation for operation in rank.records if _is_possible(operation, limit)]
        file.write(_RankTimeline(job, number, pid).serialize(possible, limit))
        yield OperationCounts(
            rank=rank.rank,
            operations=len(possible),
            earlier=max(rank.operations - len(rank.records), 0),
            impossible=len(rank.records) - len(possible),
        )


def _assign_pids(job: Job) -> list[int]:
    """Return a unique process number for each rank; viewers merge ranks with equal numbers."""
    found: dict[int, None] = {}
    for number, rank in enumerate(job.ranks):
        is_unique = 0 < rank.pid < _FIRST_SUBSTITUTE_PID and rank.pid not in found
        found[rank.pid if is_unique else _FIRST_SUBSTITUTE_PID + number] = None
    return list(found)


def _build_job_packets(job: Job) -> bytes:
    """Return the packets of no single rank: clocks, the order of ranks, the timeline's end."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    clock, end = get_clock_offset(job), _find_end(job)
    if 0 < clock < _LATEST:
        relation = builder.add_packet().clock_snapshot
        relation.primary_trace_clock = protos.BUILTIN_CLOCK_MONOTONIC
        relation.clocks.add(clock_id=protos.BUILTIN_CLOCK_MONOTONIC, timestamp=end)
        relation.clocks.add(clock_id=protos.BUILTIN_CLOCK_REALTIME, timestamp=end + clock)
    root = builder.add_packet().track_descriptor
    root.uuid = 0
    root.process_ordering = protos.TrackDescriptor.PROCESS_ORDERING_EXPLICIT
    track = builder.add_packet().track_descriptor
    track.uuid = 1
    track.name = "job"
    packet = builder.add_packet()
    packet.timestamp = end
    packet.trusted_packet_sequence_id = 1
    packet.track_event.type = protos.TrackEvent.TYPE_INSTANT
    packet.track_event.track_uuid = 1
    packet.track_event.name = "read while running" if job.running else "ended"
    serialized: bytes = builder.serialize()
    return serialized


def _find_end(job: Job) -> int:
    """Return the end of a job's timeline: now if it is running, else the end of its last rank."""
    if job.running:
        return job.now
    signs = [max(get_last_record_time(rank), determine_exit(rank, job).time) for rank in job.ranks]
    believed = [time for time in signs if time <= job.now + _SLACK]
    return max(believed, default=job.now)


class _RankTimeline:
    """The timeline of one rank: a packet sequence with its interned strings."""

    def __init__(self, job: Job, number: int, pid: int) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        self._protos = protos
        self._builder = TraceProtoBuilder()
        self._job = job
        self._rank = job.ranks[number]
        self._number = number + 2  # 1 is the job's
        self._pid = pid
        self._texts: dict[str, dict[str, int]] = {}
        self._uuids = itertools.count((number + 2) << 32)

    def serialize(self, operations: Sequence[Operation], limit: int) -> bytes:
        """Return all packets of the rank, for its operations and events up to the time `limit`."""
        status = determine_exit(self._rank, self._job)
        process = self._add_process()
        self._add_instants(process, status, limit)
        by_track: dict[tuple[int, str], list[Operation]] = {}
        for operation in operations:
            by_track.setdefault(_identify_track(self._rank, operation), []).append(operation)
        last = status.time if status.is_inactive and 0 < status.time <= limit else None
        for (_, name), on_track in sorted(by_track.items()):
            for row in _split_overlapping(on_track):
                track = self._add_track(process, name).uuid
                for operation in row:
                    self._add_operation(track, operation, last)
        self._add_reports(process, limit)
        serialized: bytes = self._builder.serialize()
        return serialized

    def _add_process(self) -> int:
        """Add the rank as a process, and return the id of its track."""
        packet = self._add_packet()
        packet.sequence_flags |= self._protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        descriptor = packet.track_descriptor
        descriptor.uuid = next(self._uuids)
        descriptor.sibling_order_rank = self._rank.rank
        descriptor.process.pid = self._pid
        descriptor.process.process_name = f"rank {self._rank.rank}"
        uuid: int = descriptor.uuid
        return uuid

    def _add_instants(self, process: int, status: ExitStatus, limit: int) -> None:
        """Add the opening of the flight recorder, and the end of the rank."""
        rank = self._rank
        opened: dict[str, _Value] = {"pid": rank.pid, "host": escape(rank.host)}
        instants = [("flight recorder opened", rank.opened, opened)]
        if status.is_inactive:
            labels = {
                "completed": "ended",
                "launcher": "stopped by its launcher",
                "vanished": "disappeared",
            }
            time = status.time or get_last_record_time(rank)
            ended: dict[str, _Value] = {"pid": rank.pid, "exception": escape(rank.exception, 1000)}
            instants.append((status.describe(labels), time, ended))
        for name, time, arguments in instants:
            if 0 < time <= limit:
                packet = self._add_event(time, process, self._protos.TrackEvent.TYPE_INSTANT)
                packet.track_event.name = name
                self._annotate(packet, arguments)

    def _add_operation(self, track: int, operation: Operation, last: int | None) -> None:
        """Add the slice of an operation; one under way ends with its rank, at `last` if known."""
        end = operation.end or (None if last is None else max(last, operation.begin))
        failed = operation.outcome not in ("", "ok")
        name = escape(operation.kind, 40)
        category = "joining" if operation.kind == "join" else "collective"
        packet = self._begin_slice(
            track,
            operation.begin,
            f"{name}: {escape(operation.outcome, 40)}" if failed else name,
            "message" if operation.is_message else category,
        )
        if flow := _get_flow(self._rank, operation):
            packet.track_event.flow_ids.append(flow)
        self._annotate(packet, _list_arguments(self._job, self._rank, operation))
        self._add_wait(track, operation, end)
        self._end_slice(track, end)

    def _add_wait(self, track: int, operation: Operation, end: int | None) -> None:
        """Add the slice of an operation's wait for peers, if it waited."""
        still = not operation.end and operation.waiting_for >= 0
        begin, until = get_wait_interval(operation, end or self._job.now)
        if not still and until <= begin:
            return
        peer = self._job.find_rank(self._rank, operation, operation.waiting_for)
        name = f"waiting for rank {peer}" if peer >= 0 else "waiting"
        self._begin_slice(track, begin, name, "waiting")
        self._end_slice(track, end if still else until)

    def _add_reports(self, process: int, limit: int) -> None:
        """Add the steps and losses given to `phalanx.report`."""
        reports = [report for report in self._rank.reports if 0 < report.time <= limit]
        steps = [(report.time, float(report.step)) for report in reports if report.step >= 0]
        losses = [(report.time, report.loss) for report in reports if report.loss is not None]
        losses = [(time, loss) for time, loss in losses if math.isfinite(loss)]
        for name, values in (("step", steps), ("loss", losses)):
            if not values:
                continue
            descriptor = self._add_track(process, name)
            descriptor.counter.SetInParent()
            for time, value in values:
                kind = self._protos.TrackEvent.TYPE_COUNTER
                packet = self._add_event(time, descriptor.uuid, kind)
                packet.track_event.double_counter_value = value

    def _add_packet(self, time: int | None = None) -> Any:
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = self._number
        packet.sequence_flags = self._protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        if time is not None:
            packet.timestamp = time
        return packet

    def _add_track(self, process: int, name: str) -> Any:
        descriptor = self._add_packet().track_descriptor
        descriptor.uuid = next(self._uuids)
        descriptor.parent_uuid = process
        descriptor.name = name
        return descriptor

    def _begin_slice(self, track: int, begin: int, name: str, category: str) -> Any:
        packet = self._add_event(begin, track, self._protos.TrackEvent.TYPE_SLICE_BEGIN)
        event = packet.track_event
        event.name_iid = self._intern(packet, "event_names", name)
        event.category_iids.append(self._intern(packet, "event_categories", category))
        return packet

    def _end_slice(self, track: int, end: int | None) -> None:
        """End the last slice of a track, unless its end is unknown."""
        if end is not None:
            self._add_event(end, track, self._protos.TrackEvent.TYPE_SLICE_END)

    def _add_event(self, time: int, track: int, kind: int) -> Any:
        packet = self._add_packet(time)
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _annotate(self, packet: Any, arguments: Mapping[str, _Value]) -> None:
        for name, value in arguments.items():
            annotation = packet.track_event.debug_annotations.add()
            annotation.name_iid = self._intern(packet, "debug_annotation_names", name)
            if isinstance(value, str):
                annotation.string_value_iid = self._intern(
                    packet, "debug_annotation_string_values", value
                )
            else:
                annotation.int_value = value

    def _intern(self, packet: Any, table: str, text: str) -> int:
        """Return the id of a text in an interning table; add a new text to the packet."""
        known = self._texts.setdefault(table, {})
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            entry = getattr(packet.interned_data, table).add()
            entry.iid = number
            if table == "debug_annotation_string_values":
                entry.str = text.encode()
            else:
                entry.name = text
        return number


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
    group = rank.get_group(operation)
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


def _list_arguments(job: Job, rank: Rank, operation: Operation) -> dict[str, _Value]:
    peer = job.find_rank(rank, operation, operation.peer)
    found: dict[str, _Value] = {
        "operation": operation.number,
        "group": _get_group_name(rank, operation),
        "tag" if operation.is_message else "sequence": operation.sequence,
        "dtype": escape(operation.dtype, 40),
        "elements": operation.count if operation.dtype else "",
        "op": escape(operation.op, 40),
        "peer" if operation.is_message else "root": peer if operation.peer >= 0 else "",
        "call site": escape(operation.site),
        "outcome": escape(operation.outcome, 40) if operation.end else "under way",
        "waited ns": operation.waited,
    }
    return {name: _fit_value(value) for name, value in found.items() if value != ""}


def _fit_value(value: _Value) -> _Value:
    return value if isinstance(value, str) or abs(value) < 1 << 63 else str(value)


def _get_flow(rank: Rank, operation: Operation) -> int:
    """Return an id for a collective that is equal on all of its ranks; 0 for a message."""
    group = rank.get_group(operation)
    if group is None or operation.is_message or operation.sequence <= 0:
        return 0
    return (group.identity * 0x9E3779B97F4A7C15 + operation.sequence) % 2**64
