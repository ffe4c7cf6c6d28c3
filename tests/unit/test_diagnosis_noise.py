"""Jobs that make no sense, or are known in part: a diagnosis and a report, never an exception."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.observe.diagnosis import diagnose
from phalanx.observe.diagnosis.exit_reasons import to_monotonic
from phalanx.observe.explain import as_json, as_text, explain
from phalanx.observe.model import Group, Job, Operation, Process, Rank, Report, Start
from tests.made_up import Story

# Small numbers meet often, large ones are beyond every limit of the formats.
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
    left=st.booleans(),
    left_at=words,
    why=words,
)
floats = st.floats()
starts = st.builds(
    Start,
    pid=numbers,
    attempt=numbers,
    time=floats,
    ended=st.none() | floats,
    code=st.none() | st.integers(-70, 300),
    stopped=st.booleans(),
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


@settings(max_examples=300)
@given(jobs)
def test_any_job_gets_a_diagnosis_and_a_report(job: Job) -> None:
    diagnosis = diagnose(job)
    assert set(diagnosis.ranks) <= {rank.rank for rank in job.ranks}
    text = as_text(job)
    assert text
    lines = text.replace("\n", "")
    assert lines.isprintable(), [c for c in lines if not c.isprintable()]
    assert json.loads(json.dumps(as_json(job)))["verdict"]["kind"] == diagnosis.kind
    assert explain(job)


@pytest.mark.parametrize("time", (math.inf, math.nan, 1.7e308, -1.7e308))
def test_times_that_no_clock_shows(time: float) -> None:
    job = Job("x", "/x", ranks=(Rank(0, clock=1, start=Start(7, 0, time, time, 1, False)),))
    assert to_monotonic(job, time) == 0
    assert explain(job)


# What may be wrong with the other ranks of a job in which one was killed.


def unreadable(story: Story, rank: int) -> None:
    story.ranks[rank].problem = "damaged: 7 bytes, expected 520192"


def without_history(story: Story, rank: int) -> None:
    story.ranks[rank].history = [o for o in story.ranks[rank].history if o.outcome != "ok"]


def without_groups(story: Story, rank: int) -> None:
    """Their notes have been taken by groups that were formed later."""
    story.ranks[rank].groups = []


def without_members(story: Story, rank: int) -> None:
    own = story.ranks[rank]
    own.groups = [replace(group, members=()) for group in own.groups]


def without_start(story: Story, rank: int) -> None:
    story.ranks[rank].start = None


def told_at_another_time(story: Story, rank: int) -> None:
    own = story.ranks[rank]
    own.history = [replace(o, end=o.end + 3 * rank) for o in own.history]


NOISE = (
    unreadable,
    without_history,
    without_groups,
    without_members,
    without_start,
    told_at_another_time,
)


@given(
    size=st.integers(3, 16),
    at_fault=st.integers(0, 15),
    noise=st.lists(st.tuples(st.sampled_from(NOISE), st.integers(0, 15)), max_size=6),
    live=st.booleans(),
)
def test_who_was_killed_is_found_in_spite_of_noise(
    size: int, at_fault: int, noise: list[tuple[Callable[[Story, int], None], int]], live: bool
) -> None:
    at_fault %= size
    others = [number for number in range(size) if number != at_fault]
    story = Story(size).together(2).begins(others, waiting_for=at_fault).passes(3)
    story.dies(at_fault, -9).passes(0.01).ends(others, "peer_lost")
    if not live:
        story.passes(0.01).fails(others, "PeerLost: a rank was killed").launcher_stops()
    # One of the others stays as it is: somebody has to tell.
    for change, rank in noise:
        if rank % size not in (at_fault, others[0]):
            change(story, rank % size)
    found = diagnose(story.job())
    assert (found.kind, found.ranks) == ("killed", (at_fault,))


@pytest.mark.parametrize("problem", ("", "damaged: 7 bytes, expected 520192"))
def test_nothing_to_go_by(problem: str) -> None:
    job = Job("x", "/x", ranks=(Rank(0, problem=problem), Rank(1, problem=problem)))
    found = diagnose(job)
    assert found.kind == "unknown"
    assert (problem or "no rank has left a flight recorder") in found.reason


def test_no_ranks_at_all() -> None:
    assert (
        diagnose(Job("x", "/x", problems=("job.json is no JSON",))).reason == "job.json is no JSON"
    )


def test_who_is_waited_for_has_an_unreadable_box() -> None:
    story = Story(3).together(2).begins([0, 2], waiting_for=1).passes(60)
    story.ranks[1].problem = "written in layout version 9, this one reads version 1"
    found = diagnose(story.job())
    assert (found.kind, found.ranks) == ("unreadable", (1,))
    assert "layout version 9" in as_text(story.job())


def test_a_dead_rank_with_an_unreadable_box() -> None:
    story = Story(3).together(2).begins([0, 2], waiting_for=1).passes(6).dies(1, -9)
    story.ranks[1].problem = "damaged"
    story.ends([0, 2], "peer_lost")
    found = diagnose(story.job())
    assert (found.kind, found.ranks) == ("killed", (1,))


def test_on_another_machine() -> None:
    """Whose processes can't be looked at: what the boxes say counts."""
    job = Story(3).together(2).begins([0, 2], waiting_for=1).passes(60).job()
    found = diagnose(replace(job, ranks=tuple(replace(rank, process=None) for rank in job.ranks)))
    assert (found.kind, found.ranks) == ("busy", (1,))


def without_box(story: Story, number: int, *problems: str) -> Job:
    """The job, read where one rank has no flight recorder that can be read and no launcher noted it."""
    job = story.job()
    ranks = tuple(Rank(number) if rank.rank == number else rank for rank in job.ranks)
    return replace(job, ranks=ranks, problems=problems)


def test_who_has_no_box_in_an_operation_is_not_missing() -> None:
    """As with a damaged box, which nobody can tell whose it is; or with one in memory only."""
    story = Story(3, launched=False).together(2).begins([0, 2], waiting_for=1).passes(60)
    job = without_box(story, 1, "801.box: damaged: group 7")
    found = diagnose(job)
    assert (found.kind, found.ranks) == ("unreadable", (1,))
    text = as_text(job)
    assert "801.box: damaged: group 7" in text
    assert "has not come to form the group" not in text


def of_one_host(story: Story, here: range) -> Job:
    """The job, read on a host that has some of its ranks."""
    job = story.job()
    ranks = tuple(rank if rank.rank in here else Rank(rank.rank) for rank in job.ranks)
    return replace(job, ranks=ranks, hosts=2, problems=("the job is on 2 hosts",))


def test_who_is_waited_for_on_another_host() -> None:
    """Each host blames the rank that the error names, which all ranks have alike."""
    words = "CollectiveTimeout: rank 3 waited for rank 2 (pid 802 on b) in all_reduce #3 until the"
    story = Story(4).together(2).begins([0, 1, 3], waiting_for=2).passes(6)
    story.ends([0, 1, 3], "timeout").passes(0.01).fails([0, 1, 3], words)
    job = of_one_host(story, range(2))
    found = diagnose(job)
    assert (found.kind, found.ranks) == ("elsewhere", (2,))
    text = as_text(job)
    assert "The way ends at rank 2, on another host." in text
    assert "rank 3 waited for rank 2 (pid 802 on b)" in text
    assert text.count("on another host") == 3  # the ranks of it, too
    there = diagnose(of_one_host(story, range(2, 4)))
    assert (there.kind, there.ranks) == ("busy", (2,))


def test_who_has_no_box_and_is_late_to_another_group_is_not_missing() -> None:
    groups = {"0": range(3), "pair": [0, 1]}
    story = Story(3, groups, launched=False).together(2).begins(0, "join", "pair").passes(60)
    found = diagnose(without_box(story, 1))
    assert (found.kind, found.ranks) == ("unreadable", (1,))


def test_who_is_waited_for_where_a_group_is_formed_is_missing() -> None:
    story = Story(3, launched=False, joined=[0, 2]).begins([0, 2], "join", waiting_for=1)
    found = diagnose(without_box(story.passes(60), 1))
    assert (found.kind, found.ranks) == ("missing", (1,))
    text = as_text(without_box(story, 1))
    assert "There is no trace of rank 1: was it started?" in text


def test_the_words_of_a_rank_tell_of_one_without_a_box() -> None:
    story = Story(2, launched=False).together().begins(0, waiting_for=1).passes(9)
    story.ends(0, "peer_lost").fails(
        0, "PeerLost: [rank 0/2] barrier #2: rank 1 (pid 801) was killed by SIGKILL", None
    )
    assert "(pid 801) was killed by SIGKILL" in as_text(without_box(story, 1))
