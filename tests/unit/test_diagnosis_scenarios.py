"""Complex scenarios: simultaneous failures, causes and consequences, healthy jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.diagnosis.explain import as_text
from phalanx.diagnosis.formatting import format_time
from phalanx.diagnosis.kinds import Diagnosis, diagnose
from tests.synthetic_jobs import SECOND, JobBuilder


def get_kind_and_ranks(builder: JobBuilder) -> tuple[str, tuple[int, ...]]:
    diagnosis = diagnose(builder.build())
    return diagnosis.kind, diagnosis.ranks


def side_ranks(diagnosis: Diagnosis) -> list[tuple[int, ...]]:
    return [side.ranks for side in diagnosis.sides]


# Nothing is wrong.


def test_a_healthy_job() -> None:
    builder = JobBuilder(4).run_collectives(10).begin([0, 2, 3], waiting_for=1).advance(0.4)
    assert get_kind_and_ranks(builder) == ("running", ())


def test_a_long_computation() -> None:
    builder = (
        JobBuilder(2)
        .run_collectives()
        .advance(7)
        .run_collectives()
        .begin(0, waiting_for=1)
        .advance(3)
    )
    assert get_kind_and_ranks(builder) == ("busy", (1,))


@pytest.mark.parametrize(("seconds", "kind"), [(4, "running"), (30, "stuck")])
def test_ranks_that_have_all_come_connect_to_each_other(seconds: float, kind: str) -> None:
    builder = JobBuilder(2).begin([0, 1], "join").advance(seconds)
    assert get_kind_and_ranks(builder)[0] == kind


def test_a_completed_job() -> None:
    builder = JobBuilder(2).run_collectives(3)
    for rank in (0, 1):
        builder.leave(rank).exit(rank)
    assert get_kind_and_ranks(builder) == ("ended", ())


def test_a_launcher_stopped_in_a_healthy_job() -> None:
    assert get_kind_and_ranks(JobBuilder(2).run_collectives(3).advance(0.2).stop_job(130)) == (
        "launcher",
        (0, 1),
    )


def test_all_ranks_are_killed_at_once() -> None:
    builder = (
        JobBuilder(3, launched=False).run_collectives(3).begin([0, 2], waiting_for=1).advance(5)
    )
    for rank in range(3):
        builder.end_process(rank)
    diagnosis = diagnose(builder.build())
    assert (diagnosis.kind, diagnosis.ranks) == ("vanished", (0, 1, 2))
    assert side_ranks(diagnosis) == [(1,), (0, 2)]


def test_a_posted_message_is_not_a_wait() -> None:
    builder = JobBuilder(2).run_collectives().begin(0, "recv", peer=1, waiting_for=-2).advance(60)
    assert get_kind_and_ranks(builder) == ("running", ())


# Links between hosts.


@pytest.mark.parametrize(("hosts", "kind"), [("aabb", "link"), ("aaaa", "deadlock")])
def test_ranks_in_one_operation_that_wait_for_each_other(hosts: str, kind: str) -> None:
    """The link between their hosts is cut; on one host it would be a defect of Phalanx."""
    builder = JobBuilder(4).run_collectives(2)
    builder.begin([0, 1], waiting_for=2).begin([2, 3], waiting_for=0).advance(20)
    job = builder.build()
    names = [replace(rank, host=f"node-{hosts[rank.rank]}") for rank in job.ranks]
    diagnosis = diagnose(replace(job, ranks=tuple(names)))
    assert (diagnosis.kind, diagnosis.ranks) == (kind, (0, 1, 2, 3))
    if kind == "link":
        text = diagnosis.describe()[0]
        assert text.startswith("The link between node-a and node-b is cut or too slow: ")


# Causes before consequences.


def test_a_chain_is_followed_to_its_end() -> None:
    """Rank 0 waits for 1 in a message, 1 for 2 in another group, 2 is in its own code."""
    builder = JobBuilder(4, groups={"0": range(4), "pair": (1, 2)}).run_collectives(2)
    builder.begin(1, "barrier", "pair", waiting_for=1).advance(1)
    builder.begin(0, "recv", peer=1).advance(1).begin(3, waiting_for=0).advance(20)
    assert get_kind_and_ranks(builder) == ("busy", (2,))
    waiting = {rank for side in diagnose(builder.build()).waiting for rank in side.ranks}
    assert waiting == {0, 1, 3}


def test_a_stopped_rank_takes_precedence_over_a_slow_one() -> None:
    """A stopped rank outranks one that may only be slow."""
    builder = JobBuilder(4).run_collectives().begin([0, 3], waiting_for=1).advance(60)
    assert get_kind_and_ranks(builder.stop_rank(2)) == ("stopped", (2,))


def test_a_stopped_rank_that_is_not_awaited_is_not_the_cause() -> None:
    builder = JobBuilder(3, groups={"0": range(3), "pair": (0, 1)}).run_collectives()
    builder.begin(0, group="pair", waiting_for=1).advance(60).stop_rank(2)
    assert get_kind_and_ranks(builder) == ("busy", (1,))


def test_a_rank_that_crashes_after_notification() -> None:
    """Rank 1 is killed; rank 0 is notified and aborts its process."""
    builder = (
        JobBuilder(3)
        .run_collectives()
        .begin([0, 2], waiting_for=1)
        .advance(1)
        .end_process(1, -9)
        .advance(0.01)
    )
    builder.end([0, 2], "peer_lost").advance(0.01).end_process(0, -6).stop_job()
    assert get_kind_and_ranks(builder) == ("killed", (1,))


def test_a_rank_that_raises_another_error_after_notification() -> None:
    builder = (
        JobBuilder(3)
        .run_collectives()
        .begin([0, 2], waiting_for=1)
        .advance(1)
        .end_process(1, -9)
        .advance(0.01)
    )
    builder.end([0, 2], "peer_lost").advance(0.01).fail([0], "RuntimeError: step failed")
    assert get_kind_and_ranks(builder.stop_job()) == ("killed", (1,))


def test_a_rank_stopped_by_the_launcher_is_not_the_cause() -> None:
    """The launcher stops rank 2 before rank 0 is notified about rank 1: it loses both."""
    builder = (
        JobBuilder(3)
        .run_collectives()
        .fail(1, "ValueError: no")
        .advance(0.1)
        .end_process(2, -15, stopped=True)
    )
    builder.begin(0).advance(0.01).end(0, "peer_lost").advance(0.01)
    assert get_kind_and_ranks(builder.fail(0, "PeerLost: rank 2 was killed by SIGTERM")) == (
        "failed",
        (1,),
    )


def test_ranks_lost_to_a_launcher_that_was_stopped() -> None:
    """Ctrl-C at the launcher of a healthy job: the first rank to end is lost to the others."""
    builder = JobBuilder(3).run_collectives().begin([0, 2], waiting_for=1).advance(0.1)
    builder.end_process(1, -15, stopped=True).advance(0.01).end([0, 2], "peer_lost")
    builder.fail([0, 2], "PeerLost: rank 1 was killed by SIGTERM")
    for rank in (0, 2):
        own = builder.ranks[rank]
        assert own.start is not None
        own.start = replace(own.start, stopped=True)
    builder.code = 130
    assert get_kind_and_ranks(builder) == ("launcher", (1,))


def test_the_timeout_of_one_group_precedes_the_failure_of_another() -> None:
    builder = JobBuilder(4, groups={"0": range(4), "pair": (0, 1)}).run_collectives(2)
    builder.begin(1, group="pair", waiting_for=0).advance(5).end(1, "timeout").advance(0.1)
    builder.fail(1, "CollectiveTimeout: rank 0 is in its own code").begin([2, 3], waiting_for=0)
    builder.advance(0.01).end([2, 3], "peer_lost").fail([2, 3], "PeerLost: rank 1 failed")
    assert get_kind_and_ranks(builder.stop_job()) == ("busy", (0,))


def test_a_rank_killed_after_the_timeout_is_not_the_cause() -> None:
    builder = JobBuilder(2).run_collectives().begin(0, waiting_for=1).advance(60).end(0, "timeout")
    builder.fail(0, "CollectiveTimeout: rank 1 is in its own code").advance(30).end_process(1, -9)
    assert get_kind_and_ranks(builder) == ("busy", (1,))


def test_several_ranks_are_killed() -> None:
    builder = (
        JobBuilder(4)
        .run_collectives()
        .begin([0, 3])
        .advance(1)
        .end_process(1, -9)
        .end_process(2, -9)
        .advance(0.01)
    )
    assert get_kind_and_ranks(builder.end([0, 3], "peer_lost")) == ("killed", (1, 2))


def test_the_first_exception_is_the_cause() -> None:
    builder = (
        JobBuilder(3)
        .run_collectives()
        .fail(2, "KeyError: 'a'")
        .advance(0.1)
        .fail(1, "KeyError: 'b'")
    )
    assert get_kind_and_ranks(builder) == ("failed", (2,))


def test_without_a_launcher_peers_record_how_a_rank_ended() -> None:
    """torch.multiprocessing ends the other ranks with SIGTERM and records nothing."""
    builder = (
        JobBuilder(3, launched=False).run_collectives().begin([0, 2], waiting_for=1).advance(1)
    )
    builder.end_process(1).advance(0.01).end([0, 2], "peer_lost").end_process(0)
    builder.fail(
        2, "PeerLost: [rank 2/3 on a] all_reduce #2: rank 1 (pid 801) was killed by SIGBUS"
    )
    diagnosis = diagnose(builder.build())
    assert (diagnosis.kind, diagnosis.ranks) == ("killed", (1,))
    assert diagnosis.exit_status is not None
    assert diagnosis.exit_status.code == -7


def test_a_job_that_continued_after_a_failure() -> None:
    """Ranks 0 and 2 form a group without rank 1; only their new failure counts."""
    builder = JobBuilder(3, groups={"0": range(3), "rest": (0, 2)}).run_collectives()
    builder.begin([0, 2], waiting_for=1).advance(1).end_process(1, -9).end([0, 2], "peer_lost")
    builder.run_collectives(5, "rest")
    assert get_kind_and_ranks(builder) == ("killed", (1,))
    assert get_kind_and_ranks(builder.begin(2, group="rest", waiting_for=0).advance(20)) == (
        "busy",
        (0,),
    )


# Variants of the kinds.


def test_ranks_that_receive_in_a_cycle() -> None:
    builder = JobBuilder(4).run_collectives()
    for rank in range(4):
        builder.begin(rank, "recv", peer=(rank + 1) % 4)
    diagnosis = diagnose(builder.advance(10).build())
    assert (diagnosis.kind, diagnosis.ranks) == ("deadlock", (0, 1, 2, 3))
    assert side_ranks(diagnosis) == [(0,), (1,), (2,), (3,)]


def test_two_ranks_that_receive_from_each_other_delay_the_rest() -> None:
    builder = JobBuilder(8).run_collectives().begin([2, 3, 4, 5, 6, 7], waiting_for=0).advance(1)
    builder.begin(0, "recv", peer=1).begin(1, "recv", peer=0).advance(10)
    diagnosis = diagnose(builder.build())
    assert (diagnosis.kind, diagnosis.ranks) == ("deadlock", (0, 1))
    assert [side.ranks for side in diagnosis.waiting] == [(2, 3, 4, 5, 6, 7)]


def test_a_recv_from_any_rank_waits_for_all() -> None:
    builder = (
        JobBuilder(3).run_collectives().begin(1, "recv").advance(1).begin([0, 2], waiting_for=1)
    )
    diagnosis = diagnose(builder.advance(10).build())
    assert (diagnosis.kind, diagnosis.ranks) == ("unsent", (1,))


def test_a_recv_from_any_rank_while_another_may_still_send() -> None:
    builder = JobBuilder(3).run_collectives().begin(1, "recv").begin(0, waiting_for=1).advance(10)
    assert get_kind_and_ranks(builder) == ("busy", (2,))


def test_a_group_that_only_some_ranks_form() -> None:
    builder = JobBuilder(4, groups={"0": range(4), "half": (0, 1)})
    for rank in (0, 1):
        builder.ranks[rank].groups[1] = replace(builder.ranks[rank].groups[1], identity=0)
    builder.ranks[1].groups.pop()
    builder.run_collectives().begin(0, "join", "half", waiting_for=1).advance(10)
    assert get_kind_and_ranks(builder) == ("busy", (1,))
    builder.begin([1, 2, 3], "barrier", waiting_for=0).advance(10)
    assert get_kind_and_ranks(builder) == ("missing", (1,))


def test_a_message_of_the_wrong_size() -> None:
    builder = (
        JobBuilder(3).run_collectives().begin(0, "send", peer=1, count=11, site="a.py:1").end(0)
    )
    builder.begin(2, "barrier", waiting_for=0).begin(1, "recv", peer=0, count=10).advance(0.01)
    diagnosis = diagnose(builder.end([1, 2], "mismatch").build())
    assert (diagnosis.kind, diagnosis.ranks) == ("message", (0, 1))
    assert diagnosis.instead is not None
    assert (diagnosis.instead.count, diagnosis.instead.site) == (11, "a.py:1")


def test_split_sizes_that_disagree_look_alike() -> None:
    builder = (
        JobBuilder(2)
        .run_collectives()
        .begin([0, 1], "all_to_all")
        .advance(0.01)
        .end(None, "mismatch")
    )
    builder.fail([0, 1], "CollectiveMismatch: split sizes disagree in all_to_all #2")
    diagnosis = diagnose(builder.build())
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (0, 1))
    assert "split sizes disagree" in diagnosis.reason


def test_a_rank_that_has_not_arrived_is_on_no_side() -> None:
    builder = JobBuilder(4).run_collectives().begin([0, 2]).begin(3, "barrier").advance(0.1)
    diagnosis = diagnose(builder.end([0, 2, 3], "mismatch").build())
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (3,))
    assert side_ranks(diagnosis) == [(3,), (0, 2)]


def test_a_rank_notified_in_an_earlier_collective_is_on_no_side() -> None:
    builder = JobBuilder(4).run_collectives().begin(range(4)).advance(0.1).end([0, 2, 3])
    builder.begin([0, 2], "barrier").begin(3).advance(0.1)
    diagnosis = diagnose(builder.end(outcome="mismatch").build())
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (3,))
    assert side_ranks(diagnosis) == [(3,), (0, 2)]


def test_a_rank_that_calls_after_the_mismatch_is_refused_and_on_a_side() -> None:
    builder = JobBuilder(3).run_collectives().begin(0).begin(1, "barrier").advance(0.1)
    builder.end([0, 1], "mismatch")
    assert get_kind_and_ranks(builder) == ("branch", (0, 1))
    diagnosis = diagnose(builder.advance(0.1).begin(2).end(2, "mismatch").build())
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (1,))
    assert side_ranks(diagnosis) == [(1,), (0, 2)]


def test_three_different_calls() -> None:
    builder = (
        JobBuilder(3).run_collectives().begin(0).begin(1, "barrier").begin(2, count=7).advance(0.1)
    )
    assert get_kind_and_ranks(builder.end(outcome="mismatch")) == ("branch", (0, 1, 2))


def test_refused_memory() -> None:
    builder = (
        JobBuilder(3).run_collectives().begin(range(3)).advance(0.1).end(outcome="out_of_memory")
    )
    builder.fail([0, 1], "PhalanxError: [rank 0/3 on a] rank 2 could not get memory for its part")
    assert get_kind_and_ranks(builder) == ("system", (2,))


def test_a_group_that_cannot_be_formed() -> None:
    """Rank 1 has another world size, and notifies rank 0, which waits."""
    builder = JobBuilder(2, launched=False).begin([0, 1], "join", waiting_for=1).advance(3)
    builder.end(1, "system").advance(0.01).end(0, "system")
    builder.fail(0, "PhalanxError: [rank 0/2] rank 1 could not join: it has world size 3", None)
    builder.fail(1, "PhalanxError: [rank 1/3] could not join: it has world size 3", None)
    assert get_kind_and_ranks(builder) == ("failed", (1,))
    assert diagnose(builder.build()).reason == builder.ranks[1].exception
    assert "waited for each other" not in as_text(builder.build())


def test_a_store_that_ends_with_its_host_while_a_group_is_formed() -> None:
    builder = (
        JobBuilder(2)
        .begin([0, 1], "join", waiting_for=1)
        .advance(3)
        .end_process(0, -9)
        .advance(0.1)
    )
    builder.end(1, "system").fail(1, "DistNetworkError: Connection reset by peer")
    assert get_kind_and_ranks(builder) == ("killed", (0,))


def test_ctrl_c_in_a_healthy_job() -> None:
    builder = JobBuilder(2, launched=False).run_collectives().begin(0, waiting_for=1).advance(0.1)
    builder.fail(1, "KeyboardInterrupt", None).advance(0.01).end(0, "peer_lost")
    assert get_kind_and_ranks(builder.fail(0, "KeyboardInterrupt", None)) == ("interrupted", (0, 1))


@pytest.mark.parametrize("code", (-9, -2, 1))
def test_ctrl_c_while_a_rank_has_not_joined(code: int) -> None:
    """Without a flight recorder, a rank cannot record an interruption, and may end late."""
    builder = JobBuilder(3, joined=[0, 2]).begin([0, 2], "join", waiting_for=1).advance(9)
    builder.end([0, 2], "interrupted")
    for rank in (0, 2):
        rank_state = builder.ranks[rank]
        rank_state.ending, rank_state.exception = "failed", "KeyboardInterrupt"
        rank_state.ended = builder.time
        builder.end_process(rank, code, stopped=True)
    assert get_kind_and_ranks(builder.advance(1).stop_job(130, 9)) == ("missing", (1,))


@pytest.mark.parametrize(("is_stopped", "kind"), [(True, "stopped"), (False, "missing")])
def test_a_missing_rank_that_sigterm_does_not_end(is_stopped: bool, kind: str) -> None:
    """A rank that is deep in native code ignores the signal, too."""
    builder = JobBuilder(3, joined=[0, 2]).begin([0, 2], "join", waiting_for=1).advance(9)
    if is_stopped:
        builder.stop_rank(1)
    builder.end_process(0, -15, stopped=True).end_process(2, -15, stopped=True)
    assert get_kind_and_ranks(builder.advance(1).stop_job(143, 9)) == (kind, (1,))


def test_ctrl_c_long_after_a_rank_has_left() -> None:
    """Rank 1 has left and ends slowly; the notified ranks do something else."""
    builder = JobBuilder(3).run_collectives().begin([0, 2], waiting_for=1).advance(0.1).leave(1)
    builder.ranks[1].ending, builder.ranks[1].ended = "left", builder.time
    builder.advance(0.01).end([0, 2], "left").advance(10)
    builder.fail([0, 2], "KeyboardInterrupt", -2).advance(0.01).stop_job()
    assert get_kind_and_ranks(builder) == ("finished", (1,))


def test_a_rank_notified_before_ctrl_c_reaches_it() -> None:
    """The launcher forwards Ctrl-C: rank 1 loses rank 0 before it is interrupted itself."""
    builder = JobBuilder(3).run_collectives().begin([0, 2], waiting_for=1).advance(0.1)
    builder.begin(1, "recv", peer=0).advance(30).end([0, 2], "interrupted").advance(0.003)
    builder.end(1, "peer_lost").fail(range(3), "KeyboardInterrupt", -2)
    assert get_kind_and_ranks(builder) == ("unsent", (1,))


def test_one_rank_is_interrupted() -> None:
    builder = JobBuilder(3).run_collectives().begin([0, 1, 2], waiting_for=0).advance(0.2)
    builder.end(outcome="interrupted").fail(1, "KeyboardInterrupt")
    builder.fail([0, 2], "Aborted: rank 1 was interrupted in all_reduce #2")
    assert get_kind_and_ranks(builder) == ("interrupted", (1,))


def test_an_abort_without_a_reason() -> None:
    builder = JobBuilder(3).run_collectives().begin([0, 2], waiting_for=1).advance(5).leave(1)
    assert get_kind_and_ranks(builder.end([0, 2], "aborted")) == ("aborted", (1,))


def test_all_ranks_in_an_operation_without_a_wait() -> None:
    builder = (
        JobBuilder(2).run_collectives().begin(0, count=10**9).begin(1, count=10**9, waiting_for=0)
    )
    assert get_kind_and_ranks(builder.advance(30)) == ("stuck", (0,))


@pytest.mark.parametrize("early", ((0,), (1, 3)))
def test_several_ranks_finish_before_the_others(early: tuple[int, ...]) -> None:
    rest = [rank for rank in range(4) if rank not in early]
    builder = JobBuilder(4).run_collectives(3).begin(rest, waiting_for=early[0]).advance(0.1)
    for rank in early:
        builder.leave(rank)
    assert get_kind_and_ranks(builder.end(rest, "left")) == ("finished", early)


def test_the_begin_of_the_failure() -> None:
    builder = JobBuilder(2).run_collectives()
    last = builder.ranks[1].history[-1].end
    diagnosis = diagnose(builder.begin(0, waiting_for=1).advance(60).build())
    assert diagnosis.since == last
    died = builder.time + SECOND
    diagnosis = diagnose(
        builder.advance(1).end_process(1, -9).advance(0.01).end(0, "peer_lost").build()
    )
    assert abs(diagnosis.since - died) < 1000


def test_a_rank_finished_when_it_left_the_group() -> None:
    builder = JobBuilder(2).run_collectives().advance(1).leave(1)
    left = int(builder.unix * 1e9)
    builder.advance(30).exit(1).begin(0, waiting_for=1).advance(5)
    assert get_kind_and_ranks(builder) == ("finished", (1,))
    assert f"Rank 1 (pid 801) finished early at {format_time(left)}" in as_text(builder.build())
