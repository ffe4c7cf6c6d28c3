"""Writer of the file of `phalanx trace`: a timeline of all ranks of a job, for ui.perfetto.dev.

The format is Perfetto's TrackEvent in protobuf, written with Perfetto's Python package (the extra
"trace"). Each rank is a process in the trace, and a packet sequence with interned strings, so that
each text is written once. Times are those of the host's monotonic clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from phalanx.errors import UsageError
from phalanx.observe.trace.timeline import build_timeline, find_end
from phalanx.observe.wait_time import map_group_ranks

if TYPE_CHECKING:
    from phalanx.observe.model import Job
    from phalanx.observe.trace.timeline import Counter, Instant, Slice, Timeline

__all__ = ["OperationCounts", "check", "write"]

_LATEST = 1 << 62
"""An upper limit for valid clock values, in nanoseconds."""
_FIRST_SUBSTITUTE_PID = 1 << 30
"""The first of the process numbers for ranks without a unique pid; no pid is this large."""


@dataclass(frozen=True)
class OperationCounts:
    """The numbers of a rank's operations that were written or omitted; see `timeline.Timeline`."""

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
        raise UsageError(
            f"phalanx trace needs Perfetto's Python package, which cannot be imported ({error}): "
            'install it with pip install "phalanx[trace]"'
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
    group_ranks = map_group_ranks(job)
    pids = _assign_pids(job)
    file.write(_build_job_packets(job))
    for number, rank in enumerate(job.ranks):
        timeline = build_timeline(rank, job, group_ranks)
        file.write(_Sequence(number, pids[number]).packets(timeline))
        yield OperationCounts(timeline.rank, timeline.slices, timeline.earlier, timeline.impossible)


def _assign_pids(job: Job) -> list[int]:
    """Return a unique process number for each rank; viewers merge ranks with equal numbers."""
    seen: set[int] = set()
    found = []
    for number, rank in enumerate(job.ranks):
        pid = (
            rank.pid
            if 0 < rank.pid < _FIRST_SUBSTITUTE_PID and rank.pid not in seen
            else _FIRST_SUBSTITUTE_PID + number
        )
        seen.add(pid)
        found.append(pid)
    return found


def _build_job_packets(job: Job) -> bytes:
    """Return the packets of no single rank: clocks, the order of ranks, the timeline's end."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    clock = next((rank.clock for rank in job.ranks if rank.clock), 0)
    end = find_end(job)
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


class _Sequence:
    """The packet sequence of one rank, with its interned strings."""

    def __init__(self, number: int, pid: int) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        self._protos = protos
        self._builder = TraceProtoBuilder()
        self._number = number + 2  # 1 is the job's
        self._pid = pid
        self._texts: dict[str, dict[str, int]] = {}
        self._tracks = itertools.count((number + 2) << 32)

    def packets(self, timeline: Timeline) -> bytes:
        """Return all packets of a rank's timeline, serialized."""
        process = next(self._tracks)
        self._first(process, timeline)
        for instant in timeline.instants:
            self._instant(process, instant)
        for lane in timeline.tracks:
            track = self._track(process, lane.name)
            for part in lane.slices:
                self._slice(track, part)
        for counter in timeline.counters:
            self._counter(process, counter)
        serialized: bytes = self._builder.serialize()
        return serialized

    def _first(self, process: int, timeline: Timeline) -> None:
        packet = self._packet()
        packet.sequence_flags |= self._protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.track_descriptor.uuid = process
        packet.track_descriptor.sibling_order_rank = timeline.rank
        packet.track_descriptor.process.pid = self._pid
        packet.track_descriptor.process.process_name = f"rank {timeline.rank}"

    def _packet(self, time: int | None = None) -> Any:
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = self._number
        packet.sequence_flags = self._protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        if time is not None:
            packet.timestamp = time
        return packet

    def _track(self, process: int, name: str) -> int:
        descriptor = self._packet().track_descriptor
        descriptor.uuid = next(self._tracks)
        descriptor.parent_uuid = process
        descriptor.name = name
        uuid: int = descriptor.uuid
        return uuid

    def _slice(self, track: int, part: Slice) -> None:
        packet = self._event(part.begin, track, self._protos.TrackEvent.TYPE_SLICE_BEGIN)
        event = packet.track_event
        event.name_iid = self._text(packet, "event_names", part.name)
        event.category_iids.append(self._text(packet, "event_categories", part.category))
        if part.flow:
            event.flow_ids.append(part.flow)
        self._annotate(packet, part.arguments)
        for inner in part.within:
            self._slice(track, inner)
        if part.end is not None:
            self._event(part.end, track, self._protos.TrackEvent.TYPE_SLICE_END)

    def _instant(self, track: int, instant: Instant) -> None:
        packet = self._event(instant.time, track, self._protos.TrackEvent.TYPE_INSTANT)
        packet.track_event.name = instant.name
        self._annotate(packet, instant.arguments)

    def _counter(self, process: int, counter: Counter) -> None:
        descriptor = self._packet().track_descriptor
        descriptor.uuid = next(self._tracks)
        descriptor.parent_uuid = process
        descriptor.name = counter.name
        descriptor.counter.SetInParent()
        for time, value in counter.values:
            packet = self._event(time, descriptor.uuid, self._protos.TrackEvent.TYPE_COUNTER)
            packet.track_event.double_counter_value = value

    def _event(self, time: int, track: int, kind: int) -> Any:
        packet = self._packet(time)
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _annotate(self, packet: Any, arguments: Mapping[str, str | int]) -> None:
        for name, value in arguments.items():
            annotation = packet.track_event.debug_annotations.add()
            annotation.name_iid = self._text(packet, "debug_annotation_names", name)
            if isinstance(value, str):
                annotation.string_value_iid = self._text(
                    packet, "debug_annotation_string_values", value
                )
            else:
                annotation.int_value = value

    def _text(self, packet: Any, table: str, text: str) -> int:
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
