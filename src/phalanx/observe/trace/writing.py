"""All ranks of a job on one timeline: the file of `phalanx trace`, for ui.perfetto.dev.

The format is Perfetto's own, TrackEvent in protobuf, written with Perfetto's Python package (the
extra "trace"). Each rank is a process, and a sequence of packets with a table of the texts in it,
so that a text is written once. Times are the host's monotonic clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from phalanx.errors import UsageError
from phalanx.observe.shares import members
from phalanx.observe.trace.timeline import latest, timeline

if TYPE_CHECKING:
    from phalanx.observe.model import Job
    from phalanx.observe.trace.timeline import Counter, Instant, Slice, Timeline

__all__ = ["Written", "check", "write"]

_LATEST = 1 << 62
"""Nanoseconds: no clock comes so far."""
_STAND_IN = 1 << 30
"""Numbers from here on are no processes': for ranks without one of their own."""


@dataclass(frozen=True)
class Written:
    """What of a rank is in the file: see `timeline.Timeline`."""

    rank: int
    operations: int
    earlier: int
    impossible: int


def check() -> None:
    """See whether Perfetto's package is there.

    Raises:
        UsageError: it isn't, or its protobuf is too old; says what to install.
    """
    try:
        import perfetto.trace_builder.proto_builder  # noqa: F401
    except Exception as error:
        raise UsageError(
            f"phalanx trace needs Perfetto's Python package, which can't be loaded ({error}): "
            'install it with pip install "phalanx[trace]"'
        ) from error


def write(job: Job, file: IO[bytes]) -> Iterator[Written]:
    """Write the timeline of a job, a rank for each step of the iterator.

    Args:
        job: As it was read, with its whole history.
        file: Where the bytes go, in order.

    Raises:
        UsageError: Perfetto's package is not installed.
        OSError: The file can't be written.
    """
    check()
    known = members(job)
    pids = _pids(job)
    file.write(_job_packets(job))
    for number, rank in enumerate(job.ranks):
        line = timeline(rank, job, known)
        file.write(_Sequence(number, pids[number]).packets(line))
        yield Written(line.rank, line.slices, line.earlier, line.impossible)


def _pids(job: Job) -> list[int]:
    """A process number for each rank, all different, or the viewer would take two ranks for one."""
    seen: set[int] = set()
    found = []
    for number, rank in enumerate(job.ranks):
        pid = rank.pid if 0 < rank.pid < _STAND_IN and rank.pid not in seen else _STAND_IN + number
        seen.add(pid)
        found.append(pid)
    return found


def _job_packets(job: Job) -> bytes:
    """What belongs to no rank: the clock, the order of the ranks, and where the timeline ends."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    clock = next((rank.clock for rank in job.ranks if rank.clock), 0)
    end = latest(job)
    if 0 < clock < _LATEST:
        snapshot = builder.add_packet().clock_snapshot
        snapshot.primary_trace_clock = protos.BUILTIN_CLOCK_MONOTONIC
        snapshot.clocks.add(clock_id=protos.BUILTIN_CLOCK_MONOTONIC, timestamp=end)
        snapshot.clocks.add(clock_id=protos.BUILTIN_CLOCK_REALTIME, timestamp=end + clock)
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
    packet.track_event.name = "read while it ran" if job.running else "ended"
    serialized: bytes = builder.serialize()
    return serialized


class _Sequence:
    """The packets of one rank, with the texts that they share."""

    def __init__(self, number: int, pid: int) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        self._protos = protos
        self._builder = TraceProtoBuilder()
        self._number = number + 2  # 1 is the job's
        self._pid = pid
        self._texts: dict[str, dict[str, int]] = {}
        self._tracks = itertools.count((number + 2) << 32)

    def packets(self, line: Timeline) -> bytes:
        """All packets of a rank's timeline."""
        process = next(self._tracks)
        self._first(process, line)
        for instant in line.instants:
            self._instant(process, instant)
        for lane in line.lanes:
            track = self._track(process, lane.name)
            for part in lane.slices:
                self._slice(track, part)
        for counter in line.counters:
            self._counter(process, counter)
        serialized: bytes = self._builder.serialize()
        return serialized

    def _first(self, process: int, line: Timeline) -> None:
        packet = self._packet()
        packet.sequence_flags |= self._protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.track_descriptor.uuid = process
        packet.track_descriptor.sibling_order_rank = line.rank
        packet.track_descriptor.process.pid = self._pid
        packet.track_descriptor.process.process_name = f"rank {line.rank}"

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
        """The number of a text in one of the sequence's tables; a new one goes into the packet."""
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
