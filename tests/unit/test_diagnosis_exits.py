"""Ends that are easily confused: a signal handler, the launcher, an unawaited message."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.diagnosis.exit_reasons import parse_group_error
from phalanx.diagnosis.explain import as_text
from phalanx.diagnosis.kinds import KINDS, Side, diagnose
from phalanx.diagnosis.model import Job
from phalanx.diagnosis.wait_for_graph import WaitForGraph
from phalanx.recorder.exception_hook import format_exception
from tests.fault_injection.matrix import agreement_errors
from tests.synthetic_jobs import JobBuilder

WORKER = "RuntimeError: DataLoader worker (pid 8048) is killed by signal: Killed."
NOTIFIED = (
    "phalanx.errors.Aborted: [rank 0/3 on node-a] all_reduce #2: rank 1 was interrupted in it"
)


def steps(job: Job) -> str:
    return "\n".join(diagnose(job).suggest_fixes())


def interrupted(exception: str, first: int) -> JobBuilder:
    """A signal handler of rank 1 raises while it waits in an operation; `first` ends first."""
    builder = JobBuilder(3).run_collectives().begin(range(3)).advance(0.01)
    for rank in (first, *(rank for rank in range(3) if rank != first)):
        builder.end(rank, "interrupted").advance(0.001)
    return builder.fail(1, exception).advance(0.001).fail([0, 2], NOTIFIED).advance(0.1)


@pytest.mark.parametrize("first", (0, 1))
def test_an_exception_in_a_signal_handler_is_not_an_interruption(first: int) -> None:
    job = interrupted(WORKER, first).build()
    diagnosis = diagnose(job)
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.reason) == ("failed", (1,), WORKER)
    assert "DataLoader" in steps(job)
    assert "journalctl" in steps(job)


@pytest.mark.parametrize("first", (0, 1))
def test_keyboard_interrupt_is_an_interruption(first: int) -> None:
    job = interrupted("KeyboardInterrupt", first).build()
    assert (diagnose(job).kind, diagnose(job).ranks) == ("interrupted", (1,))
    assert "Rank 1 (pid 801) was interrupted (Ctrl-C)" in as_text(job)


def test_a_caught_exception_of_a_signal_handler() -> None:
    """The exception is unknown, but the errors of the other ranks name the rank."""
    builder = JobBuilder(3).run_collectives().begin(range(3)).advance(0.01).end(0, "interrupted")
    builder.advance(0.001).end([1, 2], "interrupted").fail([0, 2], NOTIFIED).advance(0.1)
    job = builder.build()
    assert (diagnose(job).kind, diagnose(job).ranks) == ("interrupted", (1,))
    assert "interrupted by a signal handler that raised an exception" in as_text(job)


def test_the_root_cause_is_part_of_the_exception_text() -> None:
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


def test_an_error_raised_from_a_phalanx_error() -> None:
    assert (
        parse_group_error("RuntimeError: step 3 (caused by phalanx.errors.PeerLost: rank 1)")
        == "PeerLost"
    )
    assert parse_group_error("RuntimeError: it says PeerLost") == ""


# The launcher.


def without_launcher(builder: JobBuilder) -> Job:
    return dataclasses.replace(builder.build(), launcher=77, launcher_lost=True)


def test_the_launcher_was_killed() -> None:
    builder = JobBuilder(3).run_collectives().advance(0.1)
    for rank in range(3):
        builder.end_process(rank)
    for rank_state in builder.ranks:  # no end was recorded
        assert rank_state.start is not None
        rank_state.start = dataclasses.replace(rank_state.start, ended=None)
    job = without_launcher(builder)
    assert (diagnose(job).kind, diagnose(job).ranks) == ("launcher", (0, 1, 2))
    text = as_text(job)
    assert "The launcher (pid 77) disappeared without recording an exit" in text
    assert "phalanx run" not in steps(job)


def test_a_peer_loss_before_being_killed_with_the_launcher() -> None:
    builder = (
        JobBuilder(2).run_collectives().begin(range(2)).advance(0.1).end_process(1).advance(0.001)
    )
    builder.end(0, "peer_lost").advance(0.001)
    exception = (
        "PeerLost: [rank 0/2 on node-a] all_reduce #2: rank 1 (pid 801) was killed by SIGKILL"
    )
    assert diagnose(without_launcher(builder.fail(0, exception, None))).kind == "launcher"


def test_a_rank_killed_before_its_launcher() -> None:
    builder = (
        JobBuilder(2)
        .run_collectives()
        .begin(0, waiting_for=1)
        .advance(0.1)
        .end_process(1, -9)
        .advance(0.001)
    )
    diagnosis = diagnose(without_launcher(builder.end(0, "peer_lost").advance(0.1).end_process(0)))
    assert (diagnosis.kind, diagnosis.ranks) == ("killed", (1,))


# Messages.


@pytest.mark.parametrize(("kind", "other"), [("send", "recv"), ("recv", "send")])
@pytest.mark.parametrize("leaves", (False, True))
def test_a_message_that_was_not_waited_for(kind: str, other: str, leaves: bool) -> None:
    builder = JobBuilder(3).run_collectives().begin(0, kind, peer=1, tag=5).advance(0.1)
    if leaves:
        builder.end(0, "left").leave(0)
    builder.advance(0.1).exit(0).begin(1, other, peer=0, tag=5).advance(0.01)
    builder.end(1, "left" if leaves else "peer_lost").advance(0.01)
    builder.fail(1, "phalanx.errors.PeerLost: rank 0 (pid 800) exited with code 0")
    job = builder.stop_job().build()
    assert (diagnose(job).kind, diagnose(job).ranks) == ("unawaited", (0,))
    to = "to" if kind == "send" else "from"
    assert f"{kind} {to} rank 1 tag 5 (not waited for)" in as_text(job)
    assert "work.wait()" in steps(job)


def test_an_unneeded_message() -> None:
    builder = (
        JobBuilder(2)
        .run_collectives()
        .begin(0, "send", peer=1, tag=5)
        .exit(0)
        .begin(1, waiting_for=0)
    )
    builder.advance(0.01).end(1, "peer_lost").fail(1, "phalanx.errors.PeerLost: rank 0")
    assert diagnose(builder.build()).kind == "finished"


# Ranks that never join.


def test_a_store_that_ends_with_its_waiting_host() -> None:
    """Rank 0 hosts the store and waits in PyTorch for rank 1 before it has a flight recorder."""
    builder = JobBuilder(3, launched=False, joined=[2]).begin(2, "join", waiting_for=0).advance(3)
    for rank in builder.ranks[:2]:
        rank.pid, rank.state = 0, "gone"
    alive = diagnose(builder.build())
    # While it waits, the others have its store, so it is there. Its end may have any cause.
    assert diagnose(dataclasses.replace(builder.build(), store_host=0)).ranks == (1,)
    exception = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes"
    builder.end(2, "system").advance(0.1).fail(2, exception, None)
    job = builder.build()
    dead = diagnose(job)
    assert (alive.kind, alive.ranks) == (dead.kind, dead.ranks) == ("missing", (0, 1))
    assert "Ranks 0 and 1 did not join the group." in as_text(job)
    assert "Check that ranks 0 and 1 were started" in steps(job)
    assert "hosts the store" in steps(job)


# Agreement of subjects and verbs.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", ((1,), (1, 2)))
@pytest.mark.parametrize("live", (False, True))
def test_subjects_and_verbs_agree(kind: str, ranks: tuple[int, ...], live: bool) -> None:
    builder = JobBuilder(4).run_collectives().begin([0, 3], "recv", peer=1).advance(2)
    graph = WaitForGraph((builder if live else builder.stop_job()).build())
    others = Side((0, 3), graph.ranks[0].open[0], graph.ranks[0].groups[0])
    sides = (Side(ranks), others) if kind != "unawaited" else (others,)
    side = (Side(ranks, others.operation, others.group), others)
    for shown in (sides, side):
        for waiting in ((), (others,), (Side((0,)), Side((3,), others.operation))):
            status = graph.exits[1]
            diagnosis = KINDS[kind](
                graph, ranks, graph.moment, shown, waiting, status, reason="why"
            )
            texts = [*diagnosis.describe(), *diagnosis.suggest_fixes()]
            assert agreement_errors(texts) == []
