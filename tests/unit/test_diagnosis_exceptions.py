"""An exception outranks every wait, even while an asynchronous operation is under way."""

from __future__ import annotations

import pytest

from phalanx.diagnosis.kinds import Diagnosis, diagnose
from tests.synthetic_jobs import JobBuilder

LOST = "phalanx.errors.PeerLost: [rank 0/3 on node-a] all_reduce #4: rank 1 (pid 801) failed"
EXCEPTION = "ValueError: broken batch"
LEFT = "it left with an operation in progress"
SESSION = f"its session ended with {EXCEPTION}"


def start_operation() -> JobBuilder:
    """Rank 1 has started an asynchronous operation and is in its own code."""
    return JobBuilder(3).run_collectives().begin(1, waiting_for=0, thread=1).advance(0.001)


def raise_exception(builder: JobBuilder, abort_reason: str = LEFT) -> JobBuilder:
    """An exception ends rank 1; its operation is cut short some time before or after."""
    session = abort_reason != LEFT
    if session:
        builder.leave(1, abort_reason=abort_reason).end(1, "aborted").advance(0.001)
    builder.fail(1, EXCEPTION).advance(0.001)
    if not session:
        builder.end(1, "peer_lost").leave(1, abort_reason=abort_reason).advance(0.001)
    return builder


def check_diagnosis(builder: JobBuilder) -> Diagnosis:
    diagnosis = diagnose(builder.build())
    assert diagnosis.reason == EXCEPTION
    assert diagnosis.sides[0].operation is None, "its main thread was in no operation"
    return diagnosis


@pytest.mark.parametrize("abort_reason", (LEFT, SESSION))
def test_peers_in_their_own_code_are_stopped_by_the_launcher(abort_reason: str) -> None:
    diagnosis = check_diagnosis(
        raise_exception(start_operation(), abort_reason).advance(0.3).stop_job()
    )
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))


@pytest.mark.parametrize("abort_reason", (LEFT, SESSION))
def test_peers_lose_the_rank_afterwards(abort_reason: str) -> None:
    builder = (
        raise_exception(start_operation(), abort_reason).begin([0, 2], waiting_for=1).advance(0.001)
    )
    builder.end([0, 2], "peer_lost").fail([0, 2], LOST).advance(0.5)
    diagnosis = check_diagnosis(builder)
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))
    assert [side.ranks for side in diagnosis.waiting] == [(0, 2)]


def test_a_peer_loses_the_rank_before_its_own_operation_is_cut_short() -> None:
    builder = (
        start_operation().begin([0, 2], waiting_for=1, thread=1).advance(0.001).fail(1, EXCEPTION)
    )
    builder.advance(0.001).end(0, "peer_lost").advance(0.001).end(1, "peer_lost").advance(0.001)
    builder.end(2, "peer_lost").leave(1, abort_reason=LEFT).fail([0, 2], LOST)
    diagnosis = check_diagnosis(builder)
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))


def test_ranks_that_raise_the_same_are_named_together() -> None:
    builder = JobBuilder(4).run_collectives().fail(2, EXCEPTION).advance(0.001)
    builder.fail([0, 1], EXCEPTION).advance(0.001).fail(3, "ValueError: another").advance(0.3)
    diagnosis = diagnose(builder.stop_job().build())
    assert (diagnosis.kind, diagnosis.ranks, diagnosis.reason) == ("failed", (0, 1, 2), EXCEPTION)
    assert diagnosis.describe()[0].startswith("Ranks 0-2 failed at ")
    fixes = diagnosis.suggest_fixes()[0]
    assert fixes.startswith("Each of these ranks raised it by itself")
    assert fixes.endswith("; the exceptions of the other ranks follow from it.")


def test_a_notified_rank_is_not_the_cause() -> None:
    """Rank 0 raises the notified error; its next operation fails after that."""
    builder = raise_exception(start_operation()).begin([0, 2], waiting_for=1).advance(0.001)
    builder.end([0, 2], "peer_lost").begin(0, thread=1).advance(0.001).fail(0, LOST)
    builder.advance(0.001).end(0, "peer_lost").fail(2, LOST).advance(0.5)
    diagnosis = check_diagnosis(builder)
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))
