"""Ends that are easily taken for others: a signal handler, the launcher, an unawaited message."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from phalanx.observe.diagnosis import Diagnosis, Kind, Side, WaitForGraph, diagnose
from phalanx.observe.diagnosis.exit_reasons import parse_phalanx_error
from phalanx.observe.exception_hook import format_exception
from phalanx.observe.explain import as_text
from phalanx.observe.explain.advice import suggest_fixes
from phalanx.observe.explain.sentences import write_sentences
from phalanx.observe.model import Job
from tests.fault_injection.matrix import agreement_errors
from tests.made_up import Story

WORKER = "RuntimeError: DataLoader worker (pid 8048) is killed by signal: Killed."
TOLD = "phalanx.errors.Aborted: [rank 0/3 on node-a] all_reduce #2: rank 1 was interrupted in it"


def steps(job: Job) -> str:
    return "\n".join(suggest_fixes(WaitForGraph(job), diagnose(job)))


def interrupted(words: str, first: int) -> Story:
    """A signal handler of rank 1 raises while it waits in an operation; `first` ends first."""
    story = Story(3).together().begins(range(3)).passes(0.01)
    for rank in (first, *(rank for rank in range(3) if rank != first)):
        story.ends(rank, "interrupted").passes(0.001)
    return story.fails(1, words).passes(0.001).fails([0, 2], TOLD).passes(0.1)


@pytest.mark.parametrize("first", (0, 1))
def test_a_signal_handler_that_raised_is_no_interruption(first: int) -> None:
    job = interrupted(WORKER, first).job()
    diagnosis = diagnose(job)
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.reason) == ("failed", (1,), WORKER)
    assert "DataLoader" in steps(job)
    assert "journalctl" in steps(job)


@pytest.mark.parametrize("first", (0, 1))
def test_keyboard_interrupt_is_one(first: int) -> None:
    job = interrupted("KeyboardInterrupt", first).job()
    assert (diagnose(job).kind, diagnose(job).ranks) == ("interrupted", (1,))
    assert "Rank 1 (pid 801) was interrupted (Ctrl-C)" in as_text(job)


def test_an_exception_of_a_handler_that_was_caught() -> None:
    """Nobody knows which exception it was; the others' errors name the rank."""
    story = Story(3).together().begins(range(3)).passes(0.01).ends(0, "interrupted")
    story.passes(0.001).ends([1, 2], "interrupted").fails([0, 2], TOLD).passes(0.1)
    job = story.job()
    assert (diagnose(job).kind, diagnose(job).ranks) == ("interrupted", (1,))
    assert "interrupted by a signal handler that raised an exception" in as_text(job)


def test_the_first_cause_is_among_the_words() -> None:
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    error.__cause__ = OSError("no data")
    error.__cause__.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed\nby a signal")
    assert format_exception(error) == (
        "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly "
        "(caused by RuntimeError: DataLoader worker (pid 7) is killed)"
    )
    error.__cause__.__cause__.__cause__ = error
    assert len(format_exception(error)) < 200
    assert format_exception(KeyError("lr")) == "KeyError: 'lr'"


def test_an_error_that_was_raised_from_one_of_ours() -> None:
    assert (
        parse_phalanx_error("RuntimeError: step 3 (caused by phalanx.errors.PeerLost: rank 1)")
        == "PeerLost"
    )
    assert parse_phalanx_error("RuntimeError: it says PeerLost") == ""


# The launcher.


def without_launcher(story: Story) -> Job:
    return dataclasses.replace(story.job(), launcher=77, launcher_lost=True)


def test_the_launcher_was_killed() -> None:
    story = Story(3).together().passes(0.1)
    for rank in range(3):
        story.dies(rank)
    for character in story.ranks:  # nobody has noted an end
        assert character.start is not None
        character.start = dataclasses.replace(character.start, ended=None)
    job = without_launcher(story)
    assert (diagnose(job).kind, diagnose(job).ranks) == ("launcher", (0, 1, 2))
    text = as_text(job)
    assert "The launcher (pid 77) is gone" in text
    assert "phalanx run" not in steps(job)


def test_a_rank_lost_another_before_it_was_killed_with_the_launcher() -> None:
    story = Story(2).together().begins(range(2)).passes(0.1).dies(1).passes(0.001)
    story.ends(0, "peer_lost").passes(0.001)
    words = "PeerLost: [rank 0/2 on node-a] all_reduce #2: rank 1 (pid 801) was killed by SIGKILL"
    assert diagnose(without_launcher(story.fails(0, words, None))).kind == "launcher"


def test_a_rank_that_was_killed_before_its_launcher() -> None:
    story = Story(2).together().begins(0, waiting_for=1).passes(0.1).dies(1, -9).passes(0.001)
    diagnosis = diagnose(without_launcher(story.ends(0, "peer_lost").passes(0.1).dies(0)))
    assert (diagnosis.kind, diagnosis.ranks) == ("killed", (1,))


# Messages.


@pytest.mark.parametrize(("kind", "other"), [("send", "recv"), ("recv", "send")])
@pytest.mark.parametrize("leaves", (False, True))
def test_a_message_that_nobody_waited_for(kind: str, other: str, leaves: bool) -> None:
    story = Story(3).together().begins(0, kind, peer=1, tag=5).passes(0.1)
    if leaves:
        story.ends(0, "left").leaves(0)
    story.passes(0.1).exits(0).begins(1, other, peer=0, tag=5).passes(0.01)
    story.ends(1, "left" if leaves else "peer_lost").passes(0.01)
    story.fails(1, "phalanx.errors.PeerLost: rank 0 (pid 800) exited with code 0")
    job = story.launcher_stops().job()
    assert (diagnose(job).kind, diagnose(job).ranks) == ("unawaited", (0,))
    to = "to" if kind == "send" else "from"
    assert f"{kind} {to} rank 1 tag 5 (not waited for)" in as_text(job)
    assert "work.wait()" in steps(job)


def test_a_message_that_nobody_wanted() -> None:
    story = Story(2).together().begins(0, "send", peer=1, tag=5).exits(0).begins(1, waiting_for=0)
    story.passes(0.01).ends(1, "peer_lost").fails(1, "phalanx.errors.PeerLost: rank 0")
    assert diagnose(story.job()).kind == "finished"


# Ranks that never come.


def test_a_store_that_goes_with_a_rank_that_waited_for_others() -> None:
    """Rank 0 hosts the store, and PyTorch lets it wait for rank 1 before it has a flight recorder."""
    story = Story(3, launched=False, joined=[2]).begins(2, "join", waiting_for=0).passes(3)
    for rank in story.ranks[:2]:
        rank.pid, rank.state = 0, "gone"
    alive = diagnose(story.job())
    words = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes"
    story.ends(2, "system").passes(0.1).fails(2, words, None)
    job = story.job()
    dead = diagnose(job)
    assert (alive.kind, alive.ranks) == (dead.kind, dead.ranks) == ("missing", (0, 1))
    assert "Ranks 0 and 1 did not come to form the group." in as_text(job)
    assert "Check that ranks 0 and 1 were started" in steps(job)
    assert "hosts the store" in steps(job)


# Numbers that agree.


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("ranks", ((1,), (1, 2)))
@pytest.mark.parametrize("live", (False, True))
def test_subjects_and_verbs_agree(kind: Kind, ranks: tuple[int, ...], live: bool) -> None:
    story = Story(4).together().begins([0, 3], "recv", peer=1).passes(2)
    graph = WaitForGraph((story if live else story.launcher_stops()).job())
    others = Side((0, 3), graph.ranks[0].open[0], graph.ranks[0].groups[0])
    sides = (Side(ranks), others) if kind != "unawaited" else (others,)
    side = (Side(ranks, others.operation, others.group), others)
    for shown in (sides, side):
        for waiting in ((), (others,), (Side((0,)), Side((3,), others.operation))):
            status = graph.exits[1]
            diagnosis = Diagnosis(kind, ranks, graph.moment, shown, waiting, status, reason="why")
            texts = [*write_sentences(graph, diagnosis), *suggest_fixes(graph, diagnosis)]
            assert agreement_errors(texts) == []
