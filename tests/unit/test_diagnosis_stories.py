"""Stories with a twist: several troubles at once, causes and consequences, jobs that are well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.observe.diagnosis import Diagnosis, diagnose
from phalanx.observe.explain import as_text
from tests.made_up import SECOND, Story


def told(story: Story) -> tuple[str, tuple[int, ...]]:
    diagnosis = diagnose(story.job())
    return diagnosis.kind, diagnosis.ranks


def side_ranks(diagnosis: Diagnosis) -> list[tuple[int, ...]]:
    return [side.ranks for side in diagnosis.sides]


# Nothing is wrong.


def test_a_job_that_runs_well() -> None:
    story = Story(4).together(10).begins([0, 2, 3], waiting_for=1).passes(0.4)
    assert told(story) == ("running", ())


def test_a_long_computation_is_named_with_what_was_usual() -> None:
    story = Story(2).together().passes(7).together().begins(0, waiting_for=1).passes(3)
    assert told(story) == ("busy", (1,))


def test_a_job_that_has_ended_well() -> None:
    story = Story(2).together(3)
    for rank in (0, 1):
        story.leaves(rank).exits(rank)
    assert told(story) == ("ended", ())


def test_a_launcher_that_was_stopped_while_all_was_well() -> None:
    assert told(Story(2).together(3).passes(0.2).launcher_stops(130)) == ("launcher", (0, 1))


def test_all_are_killed_at_once() -> None:
    story = Story(3, launched=False).together(3).begins([0, 2], waiting_for=1).passes(5)
    for rank in range(3):
        story.dies(rank)
    diagnosis = diagnose(story.job())
    assert (diagnosis.kind, diagnosis.ranks) == ("vanished", (0, 1, 2))
    assert side_ranks(diagnosis) == [(1,), (0, 2)]


def test_a_message_that_is_posted_is_no_wait() -> None:
    story = Story(2).together().begins(0, "recv", peer=1, waiting_for=-2).passes(60)
    assert told(story) == ("running", ())


# Causes before consequences.


def test_a_chain_is_followed_to_its_end() -> None:
    """Rank 0 waits for 1 in a message, 1 for 2 in another group, 2 is in code of its own."""
    story = Story(4, groups={"0": range(4), "pair": (1, 2)}).together(2)
    story.begins(1, "barrier", "pair", waiting_for=1).passes(1)
    story.begins(0, "recv", peer=1).passes(1).begins(3, waiting_for=0).passes(20)
    assert told(story) == ("busy", (2,))
    waiting = {rank for side in diagnose(story.job()).waiting for rank in side.ranks}
    assert waiting == {0, 1, 3}


def test_two_causes_of_which_one_is_plain() -> None:
    """A rank that is stopped counts more than one that may only be slow."""
    story = Story(4).together().begins([0, 3], waiting_for=1).passes(60)
    assert told(story.is_stopped(2)) == ("stopped", (2,))


def test_a_stopped_rank_that_nobody_needs_is_not_why_others_wait() -> None:
    story = Story(3, groups={"0": range(3), "pair": (0, 1)}).together()
    story.begins(0, group="pair", waiting_for=1).passes(60).is_stopped(2)
    assert told(story) == ("busy", (1,))


def test_a_rank_that_crashes_because_it_was_told() -> None:
    """Rank 1 is killed, rank 0 is told, and aborts the whole process."""
    story = Story(3).together().begins([0, 2], waiting_for=1).passes(1).dies(1, -9).passes(0.01)
    story.ends([0, 2], "peer_lost").passes(0.01).dies(0, -6).launcher_stops()
    assert told(story) == ("killed", (1,))


def test_a_rank_that_raises_another_error_because_it_was_told() -> None:
    story = Story(3).together().begins([0, 2], waiting_for=1).passes(1).dies(1, -9).passes(0.01)
    story.ends([0, 2], "peer_lost").passes(0.01).fails([0], "RuntimeError: step failed")
    assert told(story.launcher_stops()) == ("killed", (1,))


def test_a_rank_that_the_launcher_stopped_is_no_cause() -> None:
    """The launcher ends rank 2 before rank 0 has heard of rank 1: it loses both."""
    story = Story(3).together().fails(1, "ValueError: no").passes(0.1).dies(2, -15, stopped=True)
    story.begins(0).passes(0.01).ends(0, "peer_lost").passes(0.01)
    assert told(story.fails(0, "PeerLost: rank 2 was killed by SIGTERM")) == ("failed", (1,))


def test_ranks_lost_to_a_launcher_that_was_stopped() -> None:
    """Ctrl-C at the launcher while all is well: the first to go is lost to the others."""
    story = Story(3).together().begins([0, 2], waiting_for=1).passes(0.1)
    story.dies(1, -15, stopped=True).passes(0.01).ends([0, 2], "peer_lost")
    story.fails([0, 2], "PeerLost: rank 1 was killed by SIGTERM")
    for rank in (0, 2):
        own = story.ranks[rank]
        assert own.start is not None
        own.start = replace(own.start, stopped=True)
    story.code = 130
    assert told(story) == ("launcher", (1,))


def test_the_deadline_of_one_group_comes_before_the_trouble_of_another() -> None:
    story = Story(4, groups={"0": range(4), "pair": (0, 1)}).together(2)
    story.begins(1, group="pair", waiting_for=0).passes(5).ends(1, "timeout").passes(0.1)
    story.fails(1, "CollectiveTimeout: rank 0 is in its own code").begins([2, 3], waiting_for=0)
    story.passes(0.01).ends([2, 3], "peer_lost").fails([2, 3], "PeerLost: rank 1 failed")
    assert told(story.launcher_stops()) == ("busy", (0,))


def test_who_was_killed_after_the_deadline_was_not_killed_before() -> None:
    story = Story(2).together().begins(0, waiting_for=1).passes(60).ends(0, "timeout")
    story.fails(0, "CollectiveTimeout: rank 1 is in its own code").passes(30).dies(1, -9)
    assert told(story) == ("busy", (1,))


def test_several_ranks_are_killed() -> None:
    story = Story(4).together().begins([0, 3]).passes(1).dies(1, -9).dies(2, -9).passes(0.01)
    assert told(story.ends([0, 3], "peer_lost")) == ("killed", (1, 2))


def test_the_first_exception_is_the_cause() -> None:
    story = Story(3).together().fails(2, "KeyError: 'a'").passes(0.1).fails(1, "KeyError: 'b'")
    assert told(story) == ("failed", (2,))


def test_without_a_launcher_peers_say_how_a_rank_ended() -> None:
    """torch.multiprocessing ends the others with SIGTERM, and notes nothing."""
    story = Story(3, launched=False).together().begins([0, 2], waiting_for=1).passes(1)
    story.dies(1).passes(0.01).ends([0, 2], "peer_lost").dies(0)
    story.fails(2, "PeerLost: [rank 2/3 on a] all_reduce #2: rank 1 (pid 801) was killed by SIGBUS")
    diagnosis = diagnose(story.job())
    assert (diagnosis.kind, diagnosis.ranks) == ("killed", (1,))
    assert diagnosis.exit_status is not None
    assert diagnosis.exit_status.code == -7


def test_a_job_that_went_on_after_a_failure() -> None:
    """Ranks 0 and 2 form a group without rank 1; the old story is over, the new one counts."""
    story = Story(3, groups={"0": range(3), "rest": (0, 2)}).together()
    story.begins([0, 2], waiting_for=1).passes(1).dies(1, -9).ends([0, 2], "peer_lost")
    story.together(5, "rest")
    assert told(story) == ("killed", (1,))
    assert told(story.begins(2, group="rest", waiting_for=0).passes(20)) == ("busy", (0,))


# Kinds with more than one face.


def test_ranks_that_receive_in_a_ring() -> None:
    story = Story(4).together()
    for rank in range(4):
        story.begins(rank, "recv", peer=(rank + 1) % 4)
    diagnosis = diagnose(story.passes(10).job())
    assert (diagnosis.kind, diagnosis.ranks) == ("deadlock", (0, 1, 2, 3))
    assert side_ranks(diagnosis) == [(0,), (1,), (2,), (3,)]


def test_two_that_receive_from_each_other_hold_up_the_rest() -> None:
    story = Story(8).together().begins([2, 3, 4, 5, 6, 7], waiting_for=0).passes(1)
    story.begins(0, "recv", peer=1).begins(1, "recv", peer=0).passes(10)
    diagnosis = diagnose(story.job())
    assert (diagnosis.kind, diagnosis.ranks) == ("deadlock", (0, 1))
    assert [side.ranks for side in diagnosis.waiting] == [(2, 3, 4, 5, 6, 7)]


def test_a_recv_from_any_rank_waits_for_all() -> None:
    story = Story(3).together().begins(1, "recv").passes(1).begins([0, 2], waiting_for=1)
    diagnosis = diagnose(story.passes(10).job())
    assert (diagnosis.kind, diagnosis.ranks) == ("unsent", (1,))


def test_a_recv_from_any_rank_while_one_may_still_send() -> None:
    story = Story(3).together().begins(1, "recv").begins(0, waiting_for=1).passes(10)
    assert told(story) == ("busy", (2,))


def test_a_group_that_only_some_ranks_form() -> None:
    story = Story(4, groups={"0": range(4), "half": (0, 1)})
    for rank in (0, 1):
        story.ranks[rank].groups[1] = replace(story.ranks[rank].groups[1], identity=0)
    story.ranks[1].groups.pop()
    story.together().begins(0, "join", "half", waiting_for=1).passes(10)
    assert told(story) == ("busy", (1,))
    story.begins([1, 2, 3], "barrier", waiting_for=0).passes(10)
    assert told(story) == ("missing", (1,))


def test_a_message_of_the_wrong_size() -> None:
    story = Story(3).together().begins(0, "send", peer=1, count=11, site="a.py:1").ends(0)
    story.begins(2, "barrier", waiting_for=0).begins(1, "recv", peer=0, count=10).passes(0.01)
    diagnosis = diagnose(story.ends([1, 2], "mismatch").job())
    assert (diagnosis.kind, diagnosis.ranks) == ("message", (0, 1))
    assert diagnosis.instead is not None
    assert (diagnosis.instead.count, diagnosis.instead.site) == (11, "a.py:1")


def test_split_sizes_that_disagree_look_alike() -> None:
    story = Story(2).together().begins([0, 1], "all_to_all").passes(0.01).ends(None, "mismatch")
    story.fails([0, 1], "CollectiveMismatch: split sizes disagree in all_to_all #2")
    diagnosis = diagnose(story.job())
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (0, 1))
    assert "split sizes disagree" in diagnosis.reason


def test_a_rank_that_has_not_come_yet_is_on_no_side() -> None:
    story = Story(4).together().begins([0, 2]).begins(3, "barrier").passes(0.1)
    diagnosis = diagnose(story.ends([0, 2, 3], "mismatch").job())
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (3,))
    assert side_ranks(diagnosis) == [(3,), (0, 2)]


def test_a_rank_that_was_told_in_the_collective_before_is_on_no_side() -> None:
    story = Story(4).together().begins(range(4)).passes(0.1).ends([0, 2, 3])
    story.begins([0, 2], "barrier").begins(3).passes(0.1)
    diagnosis = diagnose(story.ends(outcome="mismatch").job())
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (3,))
    assert side_ranks(diagnosis) == [(3,), (0, 2)]


def test_a_rank_that_calls_after_the_mismatch_is_refused_and_on_a_side() -> None:
    story = Story(3).together().begins(0).begins(1, "barrier").passes(0.1)
    story.ends([0, 1], "mismatch")
    assert told(story) == ("branch", (0, 1))
    diagnosis = diagnose(story.passes(0.1).begins(2).ends(2, "mismatch").job())
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (1,))
    assert side_ranks(diagnosis) == [(1,), (0, 2)]


def test_three_ways() -> None:
    story = Story(3).together().begins(0).begins(1, "barrier").begins(2, count=7).passes(0.1)
    assert told(story.ends(outcome="mismatch")) == ("branch", (0, 1, 2))


def test_memory_that_was_refused() -> None:
    story = Story(3).together().begins(range(3)).passes(0.1).ends(outcome="out_of_memory")
    story.fails([0, 1], "PhalanxError: [rank 0/3 on a] rank 2 could not get memory for its part")
    assert told(story) == ("system", (2,))


def test_a_group_that_can_not_be_formed() -> None:
    """Rank 1 has another world size, and says so to rank 0, which waits."""
    story = Story(2, launched=False).begins([0, 1], "join", waiting_for=1).passes(3)
    story.ends(1, "system").passes(0.01).ends(0, "system")
    story.fails(0, "PhalanxError: [rank 0/2] rank 1 could not join: it has world size 3", None)
    story.fails(1, "PhalanxError: [rank 1/3] could not join: it has world size 3", None)
    assert told(story) == ("failed", (1,))
    assert diagnose(story.job()).reason == story.ranks[1].exception
    assert "wait for each other" not in as_text(story.job())


def test_a_store_that_goes_with_its_rank_while_a_group_is_formed() -> None:
    story = Story(2).begins([0, 1], "join", waiting_for=1).passes(3).dies(0, -9).passes(0.1)
    story.ends(1, "system").fails(1, "DistNetworkError: Connection reset by peer")
    assert told(story) == ("killed", (0,))


def test_ctrl_c_while_all_is_well() -> None:
    story = Story(2, launched=False).together().begins(0, waiting_for=1).passes(0.1)
    story.fails(1, "KeyboardInterrupt", None).passes(0.01).ends(0, "peer_lost")
    assert told(story.fails(0, "KeyboardInterrupt", None)) == ("interrupted", (0, 1))


@pytest.mark.parametrize("code", (-9, -2, 1))
def test_ctrl_c_where_a_rank_has_not_come(code: int) -> None:
    """Who has no flight recorder can't say that it was interrupted, and may take long to end."""
    story = Story(3, joined=[0, 2]).begins([0, 2], "join", waiting_for=1).passes(9)
    story.ends([0, 2], "interrupted")
    for rank in (0, 2):
        character = story.ranks[rank]
        character.ending, character.exception = "failed", "KeyboardInterrupt"
        character.ended = story.time
        story.dies(rank, code, stopped=True)
    assert told(story.passes(1).launcher_stops(130, 9)) == ("missing", (1,))


def test_a_rank_that_has_not_come_and_that_sigterm_does_not_end() -> None:
    story = Story(3, joined=[0, 2]).begins([0, 2], "join", waiting_for=1).passes(9)
    story.dies(0, -15, stopped=True).dies(2, -15, stopped=True)
    assert told(story.passes(1).launcher_stops(143, 9)) == ("stopped", (1,))


def test_ctrl_c_long_after_a_rank_has_left() -> None:
    """Rank 1 has left, and is slow to end; those who were told do something else."""
    story = Story(3).together().begins([0, 2], waiting_for=1).passes(0.1).leaves(1)
    story.ranks[1].ending, story.ranks[1].ended = "left", story.time
    story.passes(0.01).ends([0, 2], "left").passes(10)
    story.fails([0, 2], "KeyboardInterrupt", -2).passes(0.01).launcher_stops()
    assert told(story) == ("finished", (1,))


def test_who_is_told_before_ctrl_c_reaches_it() -> None:
    """A launcher that hands Ctrl-C on: rank 1 loses rank 0 before it is interrupted itself."""
    story = Story(3).together().begins([0, 2], waiting_for=1).passes(0.1)
    story.begins(1, "recv", peer=0).passes(30).ends([0, 2], "interrupted").passes(0.003)
    story.ends(1, "peer_lost").fails(range(3), "KeyboardInterrupt", -2)
    assert told(story) == ("unsent", (1,))


def test_one_rank_is_interrupted() -> None:
    story = Story(3).together().begins([0, 1, 2], waiting_for=0).passes(0.2)
    story.ends(outcome="interrupted").fails(1, "KeyboardInterrupt")
    story.fails([0, 2], "Aborted: rank 1 was interrupted in all_reduce #2")
    assert told(story) == ("interrupted", (1,))


def test_an_abort_without_a_reason() -> None:
    story = Story(3).together().begins([0, 2], waiting_for=1).passes(5).leaves(1)
    assert told(story.ends([0, 2], "aborted")) == ("aborted", (1,))


def test_an_operation_in_which_all_are_and_none_waits() -> None:
    story = Story(2).together().begins(0, count=10**9).begins(1, count=10**9, waiting_for=0)
    assert told(story.passes(30)) == ("stuck", (0,))


@pytest.mark.parametrize("early", ((0,), (1, 3)))
def test_several_finish_before_the_others(early: tuple[int, ...]) -> None:
    rest = [rank for rank in range(4) if rank not in early]
    story = Story(4).together(3).begins(rest, waiting_for=early[0]).passes(0.1)
    for rank in early:
        story.leaves(rank)
    assert told(story.ends(rest, "left")) == ("finished", early)


def test_since_when() -> None:
    story = Story(2).together()
    last = story.ranks[1].history[-1].end
    diagnosis = diagnose(story.begins(0, waiting_for=1).passes(60).job())
    assert diagnosis.since == last
    died = story.time + SECOND
    diagnosis = diagnose(story.passes(1).dies(1, -9).passes(0.01).ends(0, "peer_lost").job())
    assert abs(diagnosis.since - died) < 1000
