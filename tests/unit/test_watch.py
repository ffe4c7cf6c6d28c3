"""What `phalanx watch` makes of a job that was read."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from phalanx.observe.model import Group, Job, Process, Rank, Report, Start
from phalanx.observe.watch import Row, View, as_json, build_view, get_outcome
from tests.synthetic_jobs import NOW, SECOND, ago, collective, job, message, rank, straggling, world


def row(seen: View, number: int) -> Row:
    return next(row for row in seen.rows if row.rank == number)


def reporting(*reports: tuple[float, int, float]) -> Row:
    """The row of a rank that reported (seconds ago, step, loss)."""
    given = tuple(Report(ago(when), step, loss) for when, step, loss in reports)
    return build_view(job(rank(0, reports=given), rank(1))).rows[0]


@pytest.mark.parametrize(("size", "slow"), [(2, 1), (8, 3), (64, 0), (64, 63)])
def test_the_straggler_is_named_with_how_much_the_others_wait(size: int, slow: int) -> None:
    seen = build_view(straggling(size, slow, share=0.6))
    assert seen.balance == "straggler"
    assert seen.straggler is not None
    assert seen.straggler.rank == slow
    assert seen.straggler.share == pytest.approx(0.6, abs=0.01)
    assert seen.straggler.waiting == tuple(r for r in range(size) if r != slow)
    for other in seen.rows:
        assert other.waiting == pytest.approx(0.0 if other.rank == slow else 0.6, abs=0.01)
        assert other.waits_for == (-1 if other.rank == slow else slow)


def test_ranks_that_wait_for_each_other_alike_are_even() -> None:
    history = [[collective(t + 0.1, t, 0.1, 1 - r) for t in range(5)] for r in range(2)]
    seen = build_view(job(rank(0, history=history[0]), rank(1, history=history[1])))
    assert (seen.balance, seen.straggler) == ("even", None)
    assert seen.max_share == pytest.approx(0.1, abs=0.01)


def test_in_an_even_job_the_rank_that_all_look_at_first_is_no_straggler() -> None:
    """Ranks wait for the others one after another: the first is blamed for all that are late."""
    size = 16
    ranks = []
    for r in range(size):
        whom = 0 if r else 1
        history = [collective(t + 0.4, t, 0.4, whom) for t in range(5)]
        ranks.append(rank(r, size, history))
    seen = build_view(job(*ranks))
    assert (seen.balance, seen.straggler) == ("even", None)


def test_waits_too_short_to_matter_name_nobody() -> None:
    history = [collective(t + 0.01, t, 0.01, 1) for t in range(5)]
    assert build_view(job(rank(0, history=history), rank(1))).balance == "nobody"


def test_one_rank_waits_for_nobody() -> None:
    assert build_view(job(rank(0, 1))).balance == "alone"


def test_a_rank_that_waits_itself_is_not_the_straggler() -> None:
    """2 waits for 1 as 1 waits for 0: the rank at fault is 0."""
    chain = [rank(r, 3, open=[collective(60, None, whom=r - 1)] if r else ()) for r in range(3)]
    seen = build_view(job(*chain))
    assert seen.straggler is not None
    assert (seen.straggler.rank, seen.straggler.waiting) == (0, (1,))


def test_nothing_moves_when_all_that_live_wait() -> None:
    ring = [rank(r, 3, open=[message(60, None, whom=(r + 1) % 3)]) for r in range(3)]
    assert build_view(job(*ring)).balance == "stuck"


def test_a_rank_in_code_of_its_own_holds_up_those_that_wait() -> None:
    seen = build_view(job(rank(0, open=[collective(60, None, whom=1)]), rank(1)))
    assert seen.balance == "straggler"
    assert seen.straggler is not None
    assert (seen.straggler.rank, seen.straggler.share) == (1, 1.0)


def test_a_dead_rank_is_named_and_waits_for_nobody() -> None:
    dead = rank(1, 3, [collective(20, 19, 1, 0)], [collective(4, None, whom=0)], state="gone")
    dead = replace(dead, start=Start(4001, 0, 0.0, (NOW / SECOND) - 1, -9))
    waiting = [rank(r, 3, open=[collective(4, None, whom=1)]) for r in (0, 2)]
    seen = build_view(job(waiting[0], dead, waiting[1]))
    assert seen.straggler is not None
    assert seen.straggler.rank == 1
    lost = row(seen, 1)
    assert (lost.state, lost.waiting, lost.waits_for, lost.memory) == ("SIGKILL", None, -1, None)
    assert not lost.alive
    assert lost.abnormal
    assert lost.activity.under_way


@pytest.mark.parametrize(
    ("start", "more", "state"),
    [
        (Start(4000, 0, 0.0, 1.0, 3), {}, "exit 3"),
        (None, {"ending": "failed", "exception": "ValueError: x"}, "failed"),
        (None, {"ending": "exited"}, "ended"),
        (None, {}, "gone"),
        (Start(4000, 0, 0.0, 1.0, -15, True), {}, "stopped by launcher"),
    ],
)
def test_the_state_says_how_a_rank_ended(
    start: Start | None, more: dict[str, str], state: str
) -> None:
    ended = rank(0, state="gone", start=start, **more)
    assert build_view(job(ended, rank(1))).rows[0].state == state


def test_a_rank_that_never_came_is_absent() -> None:
    seen = build_view(job(rank(0), Rank(1)))
    assert (seen.rows[1].state, seen.rows[1].waiting, seen.rows[1].abnormal) == ("absent", None, 1)


@pytest.mark.parametrize("noted", [True, False])
def test_numbers_in_a_group_become_ranks_of_the_job(noted: bool) -> None:
    """Ranks 5 and 2 are 0 and 1 in the group; with `noted` False its members weren't noted."""
    members = (5, 2) if noted else ()
    pair = {5: Group(7, "pair", 0, 2, members, 3), 2: Group(7, "pair", 1, 2, members, 3)}
    ranks = [rank(r, 6) for r in range(6)]
    for number, group in pair.items():
        ranks[number] = replace(ranks[number], groups=(world(number, 6), group))
    ranks[5] = replace(ranks[5], open=(collective(10, None, whom=1, group=1, peer=1),))
    seen = build_view(job(*ranks))
    assert (row(seen, 5).waits_for, row(seen, 5).activity.waits_for) == (2, 2)
    assert (row(seen, 5).activity.group, row(seen, 5).activity.peer) == ("pair", 2)


def test_a_wait_in_a_group_without_a_note_counts_for_nobody() -> None:
    seen = build_view(job(rank(0, open=[collective(10, None, whom=1, group=-1)]), rank(1)))
    assert (row(seen, 0).waiting, row(seen, 0).waits_for) == (1.0, -1)
    assert seen.straggler is None


def test_a_history_that_ran_over_counts_for_as_long_as_it_reaches() -> None:
    """20 operations in the last second, of which 60% waited; what was before isn't known."""
    history = [collective(0.05 * i + 0.03, 0.05 * i, 0.03, 1) for i in range(20, -1, -1)]
    busy = rank(0, history=history, operations=100_000)
    assert row(build_view(job(busy, rank(1))), 0).waiting == pytest.approx(0.6, abs=0.02)
    assert row(build_view(job(busy, rank(1))), 0).operations == pytest.approx(20, rel=0.06)


def test_before_its_flight_recorder_was_opened_a_rank_did_not_work() -> None:
    young = rank(0, opened=ago(1), history=[collective(0.5, 0, 0.5, 1)])
    assert row(build_view(job(young, rank(1))), 0).waiting == pytest.approx(0.5)


def test_waits_at_the_same_time_count_once() -> None:
    posted = [message(4 - 0.1 * i, None, whom=i % 2, number=i + 1) for i in range(20)]
    assert row(build_view(job(rank(0, open=posted), rank(1))), 0).waiting == pytest.approx(0.8)


def test_the_wait_of_a_message_is_at_its_end() -> None:
    """Posted 20 s ago, waited for in its last 2 s: all of that in the window of 5 s."""
    got = rank(0, history=[message(20, 1, 2, 1)])
    assert row(build_view(job(got, rank(1))), 0).waiting == pytest.approx(0.4)


def test_who_posted_a_message_and_does_not_wait_for_it_is_in_its_own_code() -> None:
    posted = row(
        build_view(job(rank(0, history=[collective(9, 8)], open=[message(4, None)]), rank(1))), 0
    )
    assert posted.waiting == 0
    assert not posted.activity.under_way
    assert posted.activity.others == 1
    assert posted.activity.seconds == pytest.approx(4)


def test_what_waits_is_shown_before_what_is_older() -> None:
    both = rank(0, open=[message(30, None), collective(2, None, whom=1)])
    activity = row(build_view(job(both, rank(1))), 0).activity
    assert activity.operation is not None
    assert activity.operation.kind == "all_reduce"
    assert (activity.others, activity.waits_for) == (1, 1)
    assert activity.seconds == pytest.approx(2)


def test_outside_of_operations_the_last_one_is_told() -> None:
    idle = rank(0, history=[collective(9, 8), collective(3, 2)])
    activity = row(build_view(job(idle, rank(1))), 0).activity
    assert not activity.under_way
    assert activity.seconds == pytest.approx(2)


def test_steps_per_second_are_those_of_the_window() -> None:
    slow_then_fast = [(20.0, 1, 1.0), (10.0, 2, 1.0), *((4 - i / 4, 3 + i, 1.0) for i in range(17))]
    assert reporting(*slow_then_fast).steps == pytest.approx(4)


def test_rare_steps_are_told_by_the_last_two() -> None:
    assert reporting((50, 1, 1), (30, 2, 1), (10, 3, 1)).steps == pytest.approx(0.05)


def test_steps_per_second_fall_when_no_step_comes() -> None:
    assert reporting((41, 1, 1), (40, 2, 1)).steps == pytest.approx(1 / 41)


def test_steps_that_are_counted_anew_are_no_steps_back() -> None:
    assert reporting((4, 99, 1), (3, 100, 1), (2, 1, 1), (1, 2, 1)).steps == pytest.approx(1)
    assert reporting((2, 100, 1), (1, 1, 1)).steps is None


def test_reports_without_a_step_are_none() -> None:
    noted = reporting((3, 7, 1.0), (2, 8, 1.0), (1, -1, None))
    assert (noted.step, noted.loss) == (8, 1.0)
    assert noted.steps == pytest.approx(1)
    assert reporting((1, -1, None)).step is None


def test_a_rank_that_reports_nothing_has_no_progress() -> None:
    silent = reporting()
    assert (silent.step, silent.steps, silent.loss) == (None, None, None)


def test_a_loss_that_becomes_nan_shows() -> None:
    losses = [(9 - step, step, 1.0 if step < 6 else math.nan) for step in range(9)]
    assert math.isnan(reporting(*losses).loss or 0.0)


def test_a_loss_that_is_given_now_and_then_is_the_last_one() -> None:
    losses = [(9 - step, step, float(step) if step % 3 == 0 else None) for step in range(9)]
    assert reporting(*losses).loss == 6.0


def test_a_loss_that_was_never_given_is_none() -> None:
    assert reporting((2, 1, None), (1, 2, None)).loss is None


def test_json_is_strict_and_escaped() -> None:
    odd = rank(
        0, reports=(Report(ago(1), 3, math.inf),), history=[collective(3, 2, site="\x1b[2J")]
    )
    made = job(odd, rank(1, problem="bad\u202e"), problems=("\x07",))
    text = json.dumps(as_json(made, build_view(made)), allow_nan=False)
    assert text.isascii()
    assert text.isprintable()
    read = json.loads(text)
    assert read["ranks"][0]["loss"] == "inf"
    assert read["ranks"][0]["operation"]["site"] == "\x1b[2J"


def test_json_names_the_straggler() -> None:
    made = straggling(4, 3)
    read = json.loads(json.dumps(as_json(made, build_view(made)), allow_nan=False))
    assert (read["verdict"], read["straggler"]["rank"], read["world_size"]) == ("straggler", 3, 4)
    assert read["straggler"]["waiting"] == [0, 1, 2]
    assert read["ranks"][0]["waits"] == {"3": pytest.approx(0.6, abs=0.01)}


def gone(number: int, **more: object) -> Rank:
    return replace(rank(number, state="gone"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (job(rank(0), rank(1)), None),
        (job(gone(0), rank(1)), None),
        (job(), None),
        (job(gone(0), gone(1), code=0), (True, "ended well")),
        (job(gone(0), gone(1), code=137), (False, "failed with exit code 137")),
        (job(gone(0, ending="exited"), gone(1, ending="exited")), (True, "ended: all of its")),
        (job(gone(0, ending="exited"), gone(1)), (False, "failed: rank 1 (pid 4001) is gone")),
        (
            job(gone(0, ending="failed"), gone(1)),
            (False, "failed: rank 0 (pid 4000) raised an exception"),
        ),
        (
            job(gone(0, ending="failed", exception="KeyboardInterrupt"), gone(1, ending="exited")),
            (False, "was interrupted"),
        ),
        (
            job(gone(0, start=Start(4000, 0, 0.0, 1.0, -11))),
            (False, "failed: rank 0 (pid 4000) was killed by SIGSEGV"),
        ),
    ],
)
def test_how_a_job_ended(made: Job, expected: tuple[bool, str] | None) -> None:
    found = get_outcome(made)
    if expected is None or found is None:
        assert found == expected
    else:
        assert found[0] is expected[0]
        assert found[1].startswith(expected[1])


def test_a_rank_on_another_machine_has_no_process_here() -> None:
    far = rank(1, state=None)
    seen = build_view(job(rank(0), far))
    assert (seen.rows[1].state, seen.rows[1].memory) == ("elsewhere", None)


def test_a_stopped_rank_does_not_wait_whatever_it_is_in() -> None:
    waiting = [rank(r, open=[collective(60, None, whom=1 - r)]) for r in range(2)]
    stopped = replace(waiting[1], process=Process("stopped"))
    seen = build_view(job(waiting[0], stopped))
    assert seen.rows[1].abnormal
    assert seen.rows[1].waiting is None
    assert seen.balance == "straggler"
    assert seen.straggler is not None
    assert seen.straggler.rank == 1


def test_when_all_have_ended_nobody_holds_up_anybody() -> None:
    dead = [rank(r, state="gone", open=[collective(60, None, whom=1 - r)]) for r in range(2)]
    seen = build_view(job(*dead))
    assert (seen.balance, seen.straggler) == ("over", None)
