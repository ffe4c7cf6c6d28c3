"""The timeline of `phalanx trace`, parsed from the written file."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from phalanx.diagnosis.model import Group, Job, Operation, Rank, Report, Start
from phalanx.diagnosis.trace import OperationCounts, write
from phalanx.errors import UsageError
from tests import arbitrary_jobs, perfetto_reader
from tests.perfetto_reader import ParsedSlice, ParsedTrace
from tests.synthetic_jobs import (
    CLOCK,
    NOW,
    SECOND,
    ago,
    build_straggling_job,
    collective,
    job,
    message,
    rank,
    world,
)


def write_and_parse(made: Job) -> tuple[ParsedTrace, list[OperationCounts]]:
    file = io.BytesIO()
    ranks = list(write(made, file))
    return perfetto_reader.load(file.getvalue()), ranks


def slices(*operations: Operation, number: int = 0, **more: object) -> list[ParsedSlice]:
    """Return the slices of rank 0 of two, with these operations."""
    ended = [one for one in operations if one.end]
    under_way = [one for one in operations if not one.end]
    made = job(rank(number, history=ended, open=under_way, **more), rank(1))
    return write_and_parse(made)[0].get_slices(0)


@pytest.mark.parametrize("size", [2, 64])
def test_every_operation_of_every_rank_is_written(size: int) -> None:
    made = build_straggling_job(size, slow=1)
    found, ranks = write_and_parse(made)
    assert [one.operations for one in ranks] == [20] * size
    for number in range(size):
        shown = [(one.begin, one.end, one.name) for one in found.get_slices(number)]
        expected = [(op.begin, op.end, op.kind) for op in made.ranks[number].history]
        assert shown == expected


def test_ranks_are_processes_in_their_order() -> None:
    found, _ = write_and_parse(build_straggling_job(11, slow=1))
    assert found.ordered
    by_place = sorted(found.processes.values(), key=lambda process: process[2])
    assert [name for _, name, _ in by_place] == [f"rank {number}" for number in range(11)]
    assert [pid for pid, _, _ in by_place] == list(range(4000, 4011))


def test_ranks_with_the_same_pid_or_none_stay_apart() -> None:
    made = job(rank(0, pid=7), rank(1, pid=7), Rank(2), Rank(3))
    found, _ = write_and_parse(made)
    assert len({pid for pid, _, _ in found.processes.values()}) == 4


def test_waiting_is_distinguished_from_working() -> None:
    (shown,) = slices(collective(3, 2, 0.7, 1))
    (waiting,) = shown.children
    assert (waiting.name, waiting.category) == ("waiting for rank 1", "waiting")
    assert (waiting.begin, waiting.end) == (ago(3), ago(2.3))
    assert shown.category == "collective"


def test_an_operation_without_a_wait() -> None:
    (shown,) = slices(collective(3, 2))
    assert shown.children == []


def test_a_wait_is_at_most_as_long_as_its_operation() -> None:
    (shown,) = slices(collective(3, 2, 99, 1))
    assert (shown.children[0].begin, shown.children[0].end) == (ago(3), ago(2))


def test_the_wait_of_a_message_is_at_its_end() -> None:
    (shown,) = slices(message(3, 1, 0.5, 1))
    assert (shown.children[0].begin, shown.children[0].end) == (ago(1.5), ago(1))


def test_a_wait_for_an_unknown_rank() -> None:
    (shown,) = slices(collective(3, 2, 0.5, 1, group=-1))
    assert shown.children[0].name == "waiting"


def test_an_operation_under_way_has_no_end() -> None:
    (shown,) = slices(collective(3, None, waiting_for=1))
    assert (shown.end, shown.children[0].end) == (None, None)
    assert shown.arguments["outcome"] == "under way"


def test_an_operation_of_a_dead_rank_ends_with_it() -> None:
    ended = (CLOCK + ago(1)) / SECOND
    start = Start(4000, 0.0, ended, -9)
    (shown,) = slices(collective(3, None, waiting_for=1), start=start, state="gone")
    assert shown.end == pytest.approx(ago(1), abs=1000)  # a float of Unix seconds is no finer
    assert shown.children[0].end == shown.end


def test_arguments_describe_the_operation() -> None:
    (shown,) = slices(replace(collective(3, 2, 0.25, 1, number=99), peer=1, kind="reduce"))
    assert shown.arguments == {
        "operation": 99,
        "group": "default",
        "sequence": 41,
        "dtype": "float32",
        "elements": 1024,
        "op": "SUM",
        "root": 1,
        "call site": "/srv/code/train.py:40",
        "outcome": "ok",
        "waited ns": SECOND // 4,
    }
    (sent,) = slices(message(3, 2))
    assert (sent.arguments["peer"], sent.arguments["tag"], sent.category) == (1, 7, "message")
    assert "op" not in sent.arguments


def test_the_name_of_a_failed_operation_has_its_outcome() -> None:
    (shown,) = slices(collective(3, 2, outcome="peer_lost"))
    assert (shown.name, shown.arguments["outcome"]) == ("all_reduce: peer_lost", "peer_lost")


def test_overlapping_messages_use_the_minimum_number_of_rows() -> None:
    """At most three of ten messages overlap; the collective has its own track."""
    messages = [message(20 - i, 20 - i - 2.5, number=i + 1) for i in range(10)]
    made = job(rank(0, history=[*messages, collective(15, 5)]), rank(1))
    found, _ = write_and_parse(made)
    rows = [track for track in found.get_tracks(0) if track.name == "messages"]
    assert len(rows) == 3
    assert sum(len(track.slices) for track in rows) == 10
    assert next(track.name for track in found.get_tracks(0) if track.slices) == "caller's thread"


def test_the_groups_thread_has_a_track_for_each_group() -> None:
    pair = Group(7, "pair", 0, 2, (0, 1), 3)
    history = [collective(9, 5, thread=1), collective(8, 6, thread=1, group=1), collective(4, 3)]
    made = job(rank(0, history=history, groups=(world(0, 2), pair)), rank(1))
    found, _ = write_and_parse(made)
    names = [track.name for track in found.get_tracks(0) if track.slices]
    assert names == ["caller's thread", "group's thread: default", "group's thread: pair"]


def test_other_threads_of_the_script_have_their_own_track() -> None:
    history = [collective(9, 8), collective(9, 5, thread=1), collective(8, 6, thread=2)]
    found, _ = write_and_parse(job(rank(0, history=history), rank(1)))
    shown = {track.name: track.slices[0].begin for track in found.get_tracks(0) if track.slices}
    assert shown == {
        "caller's thread": ago(9),
        "other threads": ago(8),
        "group's thread": ago(9),
    }


def test_arrows_link_a_collective_across_ranks_and_nothing_else() -> None:
    made = build_straggling_job(3, slow=1)
    other = Group(7, "pair", 0, 2, (0, 1), 3)
    extra = (collective(0.2, 0.1, group=1, sequence=1), message(0.2, 0.1, sequence=1))
    first = replace(made.ranks[0], groups=(world(0, 3), other))
    first = replace(first, history=(*first.history, *extra))
    found, _ = write_and_parse(replace(made, ranks=(first, *made.ranks[1:])))
    linked: dict[int, set[tuple[object, object]]] = {}
    for number in range(3):
        for one in found.get_slices(number):
            for flow in one.flows:
                linked.setdefault(flow, set()).add((number, one.arguments["sequence"]))
    assert len(linked) == 21
    whole = [ends for ends in linked.values() if len(ends) == 3]
    assert len(whole) == 20
    assert all(len({sequence for _, sequence in ends}) == 1 for ends in whole)
    assert all(not one.flows for one in found.get_slices(0) if one.category == "message")


def test_reports_are_counters() -> None:
    reports = (
        Report(ago(3), 7, 0.5),
        Report(ago(2), 8, math.nan),
        Report(ago(1), -1, math.inf),
        Report(NOW * 5, 9, 0.1),
    )
    found, _ = write_and_parse(job(rank(0, reports=reports), rank(1)))
    values = {track.name: track.values for track in found.get_tracks(0) if track.values}
    assert values == {"step": [(ago(3), 7.0), (ago(2), 8.0)], "loss": [(ago(3), 0.5)]}


@pytest.mark.parametrize(
    ("ended", "name"),
    [
        (
            rank(0, state="gone", ending="failed", exception="ValueError: x", ended=ago(2)),
            "failed",
        ),
        (rank(0, state="gone", ending="exited", ended=ago(2)), "ended"),
        (rank(0, state="gone", history=[collective(3, 2)]), "disappeared"),
    ],
)
def test_the_end_of_a_rank_is_marked(ended: Rank, name: str) -> None:
    found, _ = write_and_parse(job(ended, rank(1)))
    instants = [instant for track in found.get_tracks(0) for instant in track.instants]
    assert [shown for _, shown, _ in instants] == ["flight recorder opened", name]
    assert instants[1][0] == ago(2)
    assert instants[1][2]["exception"] == ended.exception


def get_end(made: Job) -> tuple[int, str]:
    """Return the end of a job's timeline, and its label."""
    found, _ = write_and_parse(made)
    ((time, name, _),) = next(t for t in found.tracks.values() if t.name == "job").instants
    return time, name


def test_the_timeline_of_a_running_job_ends_now() -> None:
    assert get_end(build_straggling_job(2, 1)) == (NOW, "read while running")


def test_the_timeline_of_an_ended_job_ends_with_the_job() -> None:
    dead = [rank(r, state="gone", history=[collective(100, 90 + r)]) for r in range(2)]
    assert get_end(job(*dead)) == (ago(60), "ended")  # when their recorders were opened
    dead = [replace(one, opened=ago(200)) for one in dead]
    assert get_end(job(*dead)) == (ago(90), "ended")


def test_times_are_related_to_the_wall_clock() -> None:
    found, _ = write_and_parse(build_straggling_job(2, 1))
    monotonic = found.clocks[protos.BUILTIN_CLOCK_MONOTONIC]
    assert found.clocks[protos.BUILTIN_CLOCK_REALTIME] - monotonic == CLOCK


def test_operations_with_impossible_times_are_omitted_and_counted() -> None:
    wrong = [
        collective(3, 2),
        replace(collective(3, 2), end=ago(4)),
        replace(collective(3, 2), begin=0),
        replace(collective(3, 2), begin=2**64 - 2, end=2**64 - 1),
    ]
    found, ranks = write_and_parse(job(rank(0, history=wrong), rank(1)))
    assert (ranks[0].operations, ranks[0].impossible) == (1, 3)
    assert len(found.get_slices(0)) == 1


def test_an_impossible_wait_ends_now() -> None:
    (shown,) = slices(replace(collective(3, None), waited=2**64 - 1))
    assert shown.end is None
    assert shown.children[0].end == NOW


def test_an_impossible_end_is_ignored() -> None:
    (shown,) = slices(
        collective(3, None, waiting_for=1), state="gone", ending="exited", ended=2**63
    )
    assert shown.end is None


def test_overwritten_operations_are_counted() -> None:
    made = rank(0, history=[collective(3, 2)], open=[collective(1, None)], operations=5002)
    assert write_and_parse(job(made))[1][0].earlier == 5000


def test_texts_of_the_job_are_escaped() -> None:
    hostile = "\x1b[2J\u202e\ud800"
    shown = slices(collective(3, 2, site=hostile, outcome=hostile))
    for text in (shown[0].name, shown[0].arguments["call site"]):
        assert str(text).isprintable()


@given(made=arbitrary_jobs.jobs(many=8))
def test_any_job_can_be_written_and_nests(made: Job) -> None:
    found, ranks = write_and_parse(made)
    for number, counts in enumerate(ranks):
        assert len(found.get_slices(number)) == counts.operations
        given_ = made.ranks[number]
        assert counts.operations + counts.impossible == len(given_.history) + len(given_.open)


def test_without_perfettos_package_the_error_names_the_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "perfetto"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    with pytest.raises(UsageError, match="pip install perfetto protobuf"):
        list(write(build_straggling_job(2, 1), io.BytesIO()))
