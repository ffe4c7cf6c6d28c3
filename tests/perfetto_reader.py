"""An independent parser of timelines, by the rules of Perfetto's trace processor.

Packets are parsed one by one with protobuf. Texts are looked up in the tables of their sequence.
Events are sorted by time, and equal times keep the order of the file. A slice begins on top of its
track's stack, and an end ends the topmost slice. An AssertionError is raised for everything that
the trace processor would count as an error or repair.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

_CLEARED = protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
_NEEDS = protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
_TABLES = (
    "event_names",
    "event_categories",
    "debug_annotation_names",
    "debug_annotation_string_values",
)


@dataclass
class ParsedSlice:
    """A slice; `end` is None if it did not end."""

    name: str
    category: str
    begin: int
    end: int | None
    arguments: dict[str, object]
    flows: tuple[int, ...]
    depth: int
    children: list[ParsedSlice] = field(default_factory=list)


@dataclass
class Track:
    """A track of a process; `process` is 0 for a global track."""

    name: str
    process: int
    slices: list[ParsedSlice] = field(default_factory=list)
    values: list[tuple[int, float]] = field(default_factory=list)
    instants: list[tuple[int, str, dict[str, object]]] = field(default_factory=list)


@dataclass
class ParsedTrace:
    """The content of a file; `processes` are (pid, name, position) by uuid."""

    processes: dict[int, tuple[int, str, int]] = field(default_factory=dict)
    tracks: dict[int, Track] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    ordered: bool = False

    def get_tracks(self, rank: int) -> list[Track]:
        """Return the tracks of a rank."""
        uuid = next(u for u, (_, name, _) in self.processes.items() if name == f"rank {rank}")
        return [t for u, t in self.tracks.items() if t.process == uuid or u == uuid]

    def get_slices(self, rank: int) -> list[ParsedSlice]:
        """Return the outermost slices of a rank."""
        return [one for track in self.get_tracks(rank) for one in track.slices]


def load(data: bytes) -> ParsedTrace:
    """Parse a file; raise AssertionError if it is invalid."""
    trace = protos.Trace.FromString(data)
    assert trace.packet, "empty"
    found = ParsedTrace()
    tables: dict[int, dict[str, dict[int, str]]] = {}
    events = []
    for packet in trace.packet:
        _intern(packet, tables)
        if packet.HasField("clock_snapshot"):
            found.clocks = {c.clock_id: c.timestamp for c in packet.clock_snapshot.clocks}
            assert packet.clock_snapshot.primary_trace_clock == protos.BUILTIN_CLOCK_MONOTONIC
        elif packet.HasField("track_descriptor"):
            _describe(packet.track_descriptor, found)
        elif packet.HasField("track_event"):
            assert packet.HasField("timestamp")
            assert 0 <= packet.timestamp < 2**63
            events.append((packet.timestamp, packet.track_event, _texts(packet, tables)))
    stacks: dict[int, list[ParsedSlice]] = defaultdict(list)
    for time, event, texts in sorted(events, key=lambda one: one[0]):
        _apply(time, event, texts, found, stacks[event.track_uuid])
    for track in found.tracks.values():
        _check(track.slices)
    return found


def _intern(packet: Any, tables: dict[int, dict[str, dict[int, str]]]) -> None:
    sequence = packet.trusted_packet_sequence_id
    if packet.sequence_flags & _CLEARED:
        assert sequence
        tables[sequence] = {name: {} for name in _TABLES}
    for name in _TABLES:
        for entry in getattr(packet.interned_data, name):
            value = entry.str.decode() if hasattr(entry, "str") else entry.name
            assert entry.iid not in tables[sequence][name], "a text was written twice"
            assert entry.iid
            tables[sequence][name][entry.iid] = value


def _describe(descriptor: Any, found: ParsedTrace) -> None:
    if descriptor.uuid == 0:
        explicit = protos.TrackDescriptor.PROCESS_ORDERING_EXPLICIT
        found.ordered = descriptor.process_ordering == explicit
        return
    assert descriptor.uuid not in found.tracks, "one uuid for two tracks"
    name = descriptor.name
    if descriptor.HasField("process"):
        process = descriptor.process
        assert process.pid not in {pid for pid, _, _ in found.processes.values()}
        position = descriptor.sibling_order_rank
        found.processes[descriptor.uuid] = (process.pid, process.process_name, position)
        name = process.process_name
    elif descriptor.parent_uuid:
        assert descriptor.parent_uuid in found.processes, "a child before its process"
    found.tracks[descriptor.uuid] = Track(name, descriptor.parent_uuid)


def _texts(packet: Any, tables: dict[int, dict[str, dict[int, str]]]) -> dict[str, Any]:
    event = packet.track_event
    used = event.name_iid or event.category_iids or event.debug_annotations
    if not used:
        return {"name": event.name, "category": "", "arguments": {}}
    assert packet.sequence_flags & _NEEDS, "interned texts without the flag"
    known = tables[packet.trusted_packet_sequence_id]
    arguments: dict[str, object] = {}
    for annotation in event.debug_annotations:
        kind = annotation.WhichOneof("value")
        value = getattr(annotation, kind)
        if kind == "string_value_iid":
            value = known["debug_annotation_string_values"][value]
        arguments[known["debug_annotation_names"][annotation.name_iid]] = value
    return {
        "name": known["event_names"][event.name_iid] if event.name_iid else event.name,
        "category": "".join(known["event_categories"][iid] for iid in event.category_iids),
        "arguments": arguments,
    }


def _apply(
    time: int, event: Any, texts: dict[str, Any], found: ParsedTrace, stack: list[ParsedSlice]
) -> None:
    track = found.tracks[event.track_uuid]
    if event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
        flows = tuple(event.flow_ids)
        made = ParsedSlice(begin=time, end=None, flows=flows, depth=len(stack), **texts)
        (stack[-1].children if stack else track.slices).append(made)
        stack.append(made)
    elif event.type == protos.TrackEvent.TYPE_SLICE_END:
        assert stack, "an end without a beginning"
        stack.pop().end = time
    elif event.type == protos.TrackEvent.TYPE_COUNTER:
        track.values.append((time, event.double_counter_value))
    else:
        assert event.type == protos.TrackEvent.TYPE_INSTANT
        track.instants.append((time, texts["name"], texts["arguments"]))


def _check(slices: list[ParsedSlice]) -> None:
    """Check that slices do not overlap and contain their children."""
    for earlier, later in itertools.pairwise(slices):
        assert earlier.end is not None, "a slice after one without an end"
        assert earlier.end <= later.begin
    for one in slices:
        for child in one.children:
            assert child.begin >= one.begin
            assert one.end is None or (child.end is not None and child.end <= one.end)
        _check(one.children)
