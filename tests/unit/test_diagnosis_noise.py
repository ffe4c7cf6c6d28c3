"""Nonsensical or partly known jobs: a diagnosis and a report, never an exception."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.diagnosis.exit_reasons import to_monotonic
from phalanx.diagnosis.explain import as_json, as_text, explain
from phalanx.diagnosis.kinds import diagnose
from phalanx.diagnosis.model import Group, Job, Operation, Process, Rank, Report, Start
from tests.synthetic_jobs import JobBuilder

# Small numbers often coincide; large ones are beyond all limits of the formats.
numbers = st.one_of(st.integers(-2, 4), st.integers(-(2**63), 2**64))
times = st.one_of(st.integers(0, 20), st.integers(0, 2**64))
words = st.one_of(
    st.sampled_from(
        [
            "",
            "KeyError: 1",
            "KeyboardInterrupt",
            "PeerLost: rank 1 (pid 3) was killed by SIGKILL",
            "phalanx.errors.CollectiveTimeout: rank 1 is stopped by a signal (SIGSTOP)",
            "Aborted: the group was aborted by rank 99999",
            "rank 2 could not get memory",
            "\x1b[31mred\x07\u202e\n\ud800",
        ]
    ),
    st.text(max_size=20),
)
kinds = st.one_of(st.sampled_from(["all_reduce", "barrier", "send", "recv", "join"]), words)
outcomes = st.sampled_from(
    "ok ok ok peer_lost mismatch timeout aborted interrupted out_of_memory system left ring".split()
)
operations = st.builds(
    Operation,
    number=numbers,
    kind=kinds,
    group=st.integers(-2, 3),
    sequence=numbers,
    dtype=words,
    count=numbers,
    op=words,
    peer=numbers,
    site=words,
    begin=times,
    end=times,
    waited=numbers,
    waiting_for=numbers,
    outcome=st.one_of(outcomes, words),
    thread=numbers,
)
groups = st.builds(
    Group,
    identity=st.integers(0, 3),
    name=words,
    rank=numbers,
    size=numbers,
    members=st.lists(numbers, max_size=4).map(tuple),
    sequence=numbers,
    left_time=times,
    left_at=words,
    abort_reason=words,
)
floats = st.floats()
starts = st.builds(
    Start,
    pid=numbers,
    time=floats,
    ended=st.none() | floats,
    code=st.none() | st.integers(-70, 300),
    stopped=st.booleans(),
    suspended=st.booleans(),
)
processes = st.builds(
    Process,
    state=st.sampled_from(["running", "sleeping", "stopped", "disk", "zombie", "gone"]),
)
reports = st.builds(Report, time=times, step=numbers, loss=floats)


def ranks(number: int) -> st.SearchStrategy[Rank]:
    return st.builds(
        Rank,
        rank=st.just(number),
        pid=st.integers(0, 2**31),
        host=words,
        clock=numbers,
        opened=times,
        ending=st.sampled_from(["", "", "left", "exited", "failed"]),
        exception=words,
        ended=times,
        groups=st.lists(groups, max_size=3).map(tuple),
        open=st.lists(operations, max_size=3).map(tuple),
        history=st.lists(operations, max_size=6).map(tuple),
        operations=numbers,
        reports=st.lists(reports, max_size=2).map(tuple),
        note=words,
        start=st.none() | starts,
        process=st.none() | processes,
        problem=st.just("") | words,
    )


jobs = st.integers(0, 5).flatmap(
    lambda size: st.builds(
        Job,
        name=words,
        path=words,
        command=st.lists(words, max_size=2).map(tuple),
        started=floats,
        world_size=numbers,
        attempt=numbers,
        code=st.none() | numbers,
        now=times,
        ranks=st.tuples(*(ranks(number) for number in range(size))),
        problems=st.lists(words, max_size=2).map(tuple),
    )
)


@pytest.mark.slow
@settings(max_examples=300)
@given(jobs)
def test_any_job_gets_a_diagnosis_and_a_report(job: Job) -> None:
    diagnosis = diagnose(job)
    assert set(diagnosis.ranks) <= {rank.rank for rank in job.ranks}
    text = as_text(job)
    assert text
    lines = text.replace("\n", "")
    assert lines.isprintable(), [c for c in lines if not c.isprintable()]
    assert json.loads(json.dumps(as_json(job)))["diagnosis"]["kind"] == diagnosis.kind
    assert explain(job)


@pytest.mark.parametrize("time", (math.inf, math.nan, 1.7e308, -1.7e308))
def test_times_outside_of_the_clocks_range(time: float) -> None:
    job = Job("x", "/x", ranks=(Rank(0, clock=1, start=Start(7, time, time, 1, False)),))
    assert to_monotonic(job, time) == 0
    assert explain(job)


# Defects of the other ranks of a job in which one rank was killed.


def unreadable(builder: JobBuilder, rank: int) -> None:
    builder.ranks[rank].problem = "damaged: 7 bytes, expected 520192"


def without_history(builder: JobBuilder, rank: int) -> None:
    builder.ranks[rank].history = [o for o in builder.ranks[rank].history if o.outcome != "ok"]


def without_groups(builder: JobBuilder, rank: int) -> None:
    """Remove the records of groups, as if groups formed later had overwritten them."""
    builder.ranks[rank].groups = []


def without_members(builder: JobBuilder, rank: int) -> None:
    own = builder.ranks[rank]
    own.groups = [replace(group, members=()) for group in own.groups]


def without_start(builder: JobBuilder, rank: int) -> None:
    builder.ranks[rank].start = None


def notified_at_another_time(builder: JobBuilder, rank: int) -> None:
    own = builder.ranks[rank]
    own.history = [replace(o, end=o.end + 3 * rank) for o in own.history]


NOISE = (
    unreadable,
    without_history,
    without_groups,
    without_members,
    without_start,
    notified_at_another_time,
)


@given(
    size=st.integers(3, 16),
    at_fault=st.integers(0, 15),
    noise=st.lists(st.tuples(st.sampled_from(NOISE), st.integers(0, 15)), max_size=6),
    live=st.booleans(),
)
def test_a_killed_rank_is_found_despite_noise(
    size: int, at_fault: int, noise: list[tuple[Callable[[JobBuilder, int], None], int]], live: bool
) -> None:
    at_fault %= size
    others = [number for number in range(size) if number != at_fault]
    builder = JobBuilder(size).run_collectives(2).begin(others, waiting_for=at_fault).advance(3)
    builder.end_process(at_fault, -9).advance(0.01).end(others, "peer_lost")
    if not live:
        builder.advance(0.01).fail(others, "PeerLost: a rank was killed").stop_job()
    # One of the other ranks remains intact, as evidence.
    for change, rank in noise:
        if rank % size not in (at_fault, others[0]):
            change(builder, rank % size)
    found = diagnose(builder.build())
    assert (found.kind, found.ranks) == ("killed", (at_fault,))


@pytest.mark.parametrize("problem", ("", "damaged: 7 bytes, expected 520192"))
def test_no_data(problem: str) -> None:
    job = Job("x", "/x", ranks=(Rank(0, problem=problem), Rank(1, problem=problem)))
    found = diagnose(job)
    assert found.kind == "unknown"
    assert (problem or "no rank has left a flight recorder") in found.reason


def test_no_ranks_at_all() -> None:
    assert (
        diagnose(Job("x", "/x", problems=("job.json is no JSON",))).reason == "job.json is no JSON"
    )


def test_an_awaited_rank_with_an_unreadable_recorder() -> None:
    builder = JobBuilder(3).run_collectives(2).begin([0, 2], waiting_for=1).advance(60)
    builder.ranks[1].problem = "written in layout version 9, this one reads version 1"
    found = diagnose(builder.build())
    assert (found.kind, found.ranks) == ("unreadable", (1,))
    assert "layout version 9" in as_text(builder.build())


def test_a_dead_rank_with_an_unreadable_recorder() -> None:
    builder = (
        JobBuilder(3).run_collectives(2).begin([0, 2], waiting_for=1).advance(6).end_process(1, -9)
    )
    builder.ranks[1].problem = "damaged"
    builder.end([0, 2], "peer_lost")
    found = diagnose(builder.build())
    assert (found.kind, found.ranks) == ("killed", (1,))


def test_ranks_on_another_machine() -> None:
    """If the processes are not visible, the flight recorders decide."""
    job = JobBuilder(3).run_collectives(2).begin([0, 2], waiting_for=1).advance(60).build()
    found = diagnose(replace(job, ranks=tuple(replace(rank, process=None) for rank in job.ranks)))
    assert (found.kind, found.ranks) == ("busy", (1,))


def without_recorder(builder: JobBuilder, number: int, *problems: str) -> Job:
    """Return the job without a readable flight recorder and launcher record of one rank."""
    job = builder.build()
    ranks = tuple(Rank(number) if rank.rank == number else rank for rank in job.ranks)
    return replace(job, ranks=ranks, problems=problems)


def test_a_rank_without_a_recorder_in_an_operation_is_not_missing() -> None:
    """Its recorder may be damaged, so that its rank is unknown, or be in memory only."""
    builder = (
        JobBuilder(3, launched=False).run_collectives(2).begin([0, 2], waiting_for=1).advance(60)
    )
    job = without_recorder(builder, 1, "801.recorder: damaged: group 7")
    found = diagnose(job)
    assert (found.kind, found.ranks) == ("unreadable", (1,))
    text = as_text(job)
    assert "801.recorder: damaged: group 7" in text
    assert "has not joined the group" not in text


def select_host(builder: JobBuilder, here: range) -> Job:
    """Return the job as read on a host that has some of its ranks."""
    job = builder.build()
    ranks = tuple(rank if rank.rank in here else Rank(rank.rank) for rank in job.ranks)
    return replace(job, ranks=ranks, hosts=2, problems=("the job is on 2 hosts",))


def test_an_awaited_rank_on_another_host() -> None:
    """Each host names the rank from the error, which is the same on all ranks."""
    words = "CollectiveTimeout: rank 3 waited for rank 2 (pid 802 on b) in all_reduce #3 until the"
    builder = JobBuilder(4).run_collectives(2).begin([0, 1, 3], waiting_for=2).advance(6)
    builder.end([0, 1, 3], "timeout").advance(0.01).fail([0, 1, 3], words)
    job = select_host(builder, range(2))
    found = diagnose(job)
    assert (found.kind, found.ranks) == ("other_host", (2,))
    text = as_text(job)
    assert "The chain of waits ends at rank 2, on another host." in text
    assert "rank 3 waited for rank 2 (pid 802 on b)" in text
    assert text.count("on another host") == 3  # with the two ranks of that host
    there = diagnose(select_host(builder, range(2, 4)))
    assert (there.kind, there.ranks) == ("busy", (2,))


def test_a_late_rank_without_a_recorder_is_not_missing() -> None:
    groups = {"0": range(3), "pair": [0, 1]}
    builder = (
        JobBuilder(3, groups, launched=False)
        .run_collectives(2)
        .begin(0, "join", "pair")
        .advance(60)
    )
    found = diagnose(without_recorder(builder, 1))
    assert (found.kind, found.ranks) == ("unreadable", (1,))


def test_an_awaited_rank_that_has_not_joined_is_missing() -> None:
    builder = JobBuilder(3, launched=False, joined=[0, 2]).begin([0, 2], "join", waiting_for=1)
    found = diagnose(without_recorder(builder.advance(60), 1))
    assert (found.kind, found.ranks) == ("missing", (1,))
    text = as_text(without_recorder(builder, 1))
    assert "There is no trace of rank 1: was it started?" in text


def test_an_exception_describes_a_rank_without_a_recorder() -> None:
    builder = JobBuilder(2, launched=False).run_collectives().begin(0, waiting_for=1).advance(9)
    builder.end(0, "peer_lost").fail(
        0, "PeerLost: [rank 0/2] barrier #2: rank 1 (pid 801) was killed by SIGKILL", None
    )
    assert "(pid 801) was killed by SIGKILL" in as_text(without_recorder(builder, 1))
