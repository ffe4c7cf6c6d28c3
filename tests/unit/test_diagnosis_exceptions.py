"""An exception outranks every wait, even while an asynchronous operation is under way."""

from __future__ import annotations

import pytest

from phalanx.observe.diagnosis import Diagnosis, diagnose
from tests.made_up import Story

LOST = "phalanx.errors.PeerLost: [rank 0/3 on node-a] all_reduce #4: rank 1 (pid 801) failed"
WORDS = "ValueError: broken batch"
LEFT = "it left with an operation in progress"
SESSION = f"its session ended with {WORDS}"


def under_way() -> Story:
    """Rank 1 has started an asynchronous operation, and is in code of its own."""
    return Story(3).together().begins(1, waiting_for=0, thread=1).passes(0.001)


def raises(story: Story, why: str = LEFT) -> Story:
    """An exception ends rank 1; its operation is cut short some time later, or before."""
    session = why != LEFT
    if session:
        story.leaves(1, why=why).ends(1, "aborted").passes(0.001)
    story.fails(1, WORDS).passes(0.001)
    if not session:
        story.ends(1, "peer_lost").leaves(1, why=why).passes(0.001)
    return story


def diagnosis_of(story: Story) -> Diagnosis:
    diagnosis = diagnose(story.job())
    assert diagnosis.reason == WORDS
    assert diagnosis.sides[0].operation is None, "its main thread was in no operation"
    return diagnosis


@pytest.mark.parametrize("why", (LEFT, SESSION))
def test_peers_in_code_of_their_own_are_stopped_by_the_launcher(why: str) -> None:
    diagnosis = diagnosis_of(raises(under_way(), why).passes(0.3).launcher_stops())
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))


@pytest.mark.parametrize("why", (LEFT, SESSION))
def test_peers_lose_it_afterwards(why: str) -> None:
    story = raises(under_way(), why).begins([0, 2], waiting_for=1).passes(0.001)
    story.ends([0, 2], "peer_lost").fails([0, 2], LOST).passes(0.5)
    diagnosis = diagnosis_of(story)
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))
    assert [side.ranks for side in diagnosis.waiting] == [(0, 2)]


def test_a_peer_loses_it_before_its_own_operation_is_cut_short() -> None:
    story = under_way().begins([0, 2], waiting_for=1, thread=1).passes(0.001).fails(1, WORDS)
    story.passes(0.001).ends(0, "peer_lost").passes(0.001).ends(1, "peer_lost").passes(0.001)
    story.ends(2, "peer_lost").leaves(1, why=LEFT).fails([0, 2], LOST)
    diagnosis = diagnosis_of(story)
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))


def test_a_rank_that_was_told_is_no_cause() -> None:
    """Rank 0 raises what it was told; its next operation breaks after that."""
    story = raises(under_way()).begins([0, 2], waiting_for=1).passes(0.001)
    story.ends([0, 2], "peer_lost").begins(0, thread=1).passes(0.001).fails(0, LOST)
    story.passes(0.001).ends(0, "peer_lost").fails(2, LOST).passes(0.5)
    diagnosis = diagnosis_of(story)
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))
