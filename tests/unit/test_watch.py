"""The view of `phalanx watch`, computed from a reading of a job."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest

from phalanx.diagnosis.model import Group, Job, Process, Rank, Report, Start
from phalanx.diagnosis.watch import Row, View, as_json, build_view, get_outcome
from phalanx.diagnosis.watch_table import describe_activity, describe_balance
from tests.synthetic_jobs import (
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


def get_row(view: View, number: int) -> Row:
    return next(row for row in view.rows if row.rank == number)


def build_row_with_reports(*reports: tuple[float, int, float]) -> Row:
    """Return the row of a rank that reported (seconds ago, step, loss)."""
    given = tuple(Report(ago(when), step, loss) for when, step, loss in reports)
    return build_view(job(rank(0, reports=given), rank(1))).rows[0]


@pytest.mark.parametrize(("size", "slow"), [(2, 1), (8, 3), (64, 0), (64, 63)])
def test_the_straggler_is_named_with_the_share_of_waiting(size: int, slow: int) -> None:
    view = build_view(build_straggling_job(size, slow, share=0.6))
    assert view.balance == "straggler"
    assert view.straggler is not None
    assert view.straggler.rank == slow
    assert view.straggler.share == pytest.approx(0.6, abs=0.01)
    assert view.straggler.waiting == tuple(r for r in range(size) if r != slow)
    for other in view.rows:
        assert other.waiting == pytest.approx(0.0 if other.rank == slow else 0.6, abs=0.01)
        assert other.waits_for == (-1 if other.rank == slow else slow)


def test_ranks_that_wait_for_each_other_equally_are_balanced() -> None:
    history = [[collective(t + 0.1, t, 0.1, 1 - r) for t in range(5)] for r in range(2)]
    view = build_view(job(rank(0, history=history[0]), rank(1, history=history[1])))
    assert (view.balance, view.straggler) == ("balanced", None)
    assert view.max_share == pytest.approx(0.1, abs=0.01)


def test_the_rank_checked_first_in_a_balanced_job_is_not_the_straggler() -> None:
    """Ranks check the others in order, so the first is waited for on behalf of all late ranks."""
    size = 16
    ranks = []
    for r in range(size):
        waiting_for = 0 if r else 1
        history = [collective(t + 0.4, t, 0.4, waiting_for) for t in range(5)]
        ranks.append(rank(r, size, history))
    view = build_view(job(*ranks))
    assert (view.balance, view.straggler) == ("balanced", None)


def test_short_waits_name_no_straggler() -> None:
    history = [collective(t + 0.01, t, 0.01, 1) for t in range(5)]
    assert build_view(job(rank(0, history=history), rank(1))).balance == "no_waits"


def test_a_single_rank() -> None:
    assert build_view(job(rank(0, 1))).balance == "single_rank"


def test_ranks_that_have_not_joined() -> None:
    started = Start(4000, time.time() - 90)
    ranks = [Rank(n, pid=4000 + n, start=started, process=Process("running")) for n in range(2)]
    view = build_view(job(*ranks))
    assert view.balance == "not_joined"
    assert describe_balance(job(*ranks), view).plain == "No rank has joined a group yet."
    for row in view.rows:
        assert (row.waiting, row.has_joined) == (None, False)
        assert describe_activity(row).startswith("not joined yet, ")
        assert row.activity.seconds >= 90
    assert build_view(job(ranks[0], rank(1))).balance == "no_waits"


def test_a_rank_that_waits_itself_is_not_the_straggler() -> None:
    """2 waits for 1 as 1 waits for 0: the rank at fault is 0."""
    chain = [
        rank(r, 3, open=[collective(60, None, waiting_for=r - 1)] if r else ()) for r in range(3)
    ]
    view = build_view(job(*chain))
    assert view.straggler is not None
    assert (view.straggler.rank, view.straggler.waiting) == (0, (1,))


def test_a_job_is_stuck_if_all_live_ranks_wait() -> None:
    cycle = [rank(r, 3, open=[message(60, None, waiting_for=(r + 1) % 3)]) for r in range(3)]
    assert build_view(job(*cycle)).balance == "stuck"


def test_a_rank_in_its_own_code_delays_the_waiting_ranks() -> None:
    view = build_view(job(rank(0, open=[collective(60, None, waiting_for=1)]), rank(1)))
    assert view.balance == "straggler"
    assert view.straggler is not None
    assert (view.straggler.rank, view.straggler.share) == (1, 1.0)


def test_a_dead_rank_is_named_and_does_not_wait() -> None:
    dead = rank(
        1, 3, [collective(20, 19, 1, 0)], [collective(4, None, waiting_for=0)], state="gone"
    )
    dead = replace(dead, start=Start(4001, 0.0, (NOW / SECOND) - 1, -9))
    waiting = [rank(r, 3, open=[collective(4, None, waiting_for=1)]) for r in (0, 2)]
    view = build_view(job(waiting[0], dead, waiting[1]))
    assert view.straggler is not None
    assert view.straggler.rank == 1
    lost = get_row(view, 1)
    assert (lost.state, lost.waiting, lost.waits_for, lost.memory) == ("SIGKILL", None, -1, None)
    assert not lost.is_alive
    assert lost.is_abnormal
    assert lost.activity.under_way


@pytest.mark.parametrize(
    ("start", "more", "state"),
    [
        (Start(4000, 0.0, 1.0, 3), {}, "exit 3"),
        (None, {"ending": "failed", "exception": "ValueError: x"}, "failed"),
        (None, {"ending": "exited"}, "ended"),
        (None, {}, "disappeared"),
        (Start(4000, 0.0, 1.0, -15, True), {}, "stopped by launcher"),
    ],
)
def test_the_state_describes_how_a_rank_ended(
    start: Start | None, more: dict[str, str], state: str
) -> None:
    ended = rank(0, state="gone", start=start, **more)
    assert build_view(job(ended, rank(1))).rows[0].state == state


def test_a_rank_without_a_trace_is_absent() -> None:
    view = build_view(job(rank(0), Rank(1)))
    assert (view.rows[1].state, view.rows[1].waiting, view.rows[1].is_abnormal) == (
        "absent",
        None,
        1,
    )


@pytest.mark.parametrize("has_members", [True, False])
def test_numbers_in_a_group_become_ranks_of_the_job(has_members: bool) -> None:
    """Ranks 5 and 2 are 0 and 1 in the group, whose members may not have been recorded."""
    members = (5, 2) if has_members else ()
    pair = {5: Group(7, "pair", 0, 2, members, 3), 2: Group(7, "pair", 1, 2, members, 3)}
    ranks = [rank(r, 6) for r in range(6)]
    for number, group in pair.items():
        ranks[number] = replace(ranks[number], groups=(world(number, 6), group))
    ranks[5] = replace(ranks[5], open=(collective(10, None, waiting_for=1, group=1, peer=1),))
    view = build_view(job(*ranks))
    assert (get_row(view, 5).waits_for, get_row(view, 5).activity.waits_for) == (2, 2)
    assert (get_row(view, 5).activity.group, get_row(view, 5).activity.peer) == ("pair", 2)


def test_a_wait_in_a_group_that_is_formed_counts_for_the_awaited_rank() -> None:
    """Groups have no identity until they are formed, and several may be formed at once."""
    pairs = [Group(0, f"{first}", 0, 2, (first, first + 1)) for first in (0, 2)]
    joining = collective(10, None, waiting_for=1, kind="join", sequence=0)
    ranks = [rank(r, 4) for r in range(4)]
    for pair in pairs:
        first = pair.members[0]
        ranks[first] = replace(ranks[first], groups=(pair,), open=(joining,))
    view = build_view(job(*ranks))
    assert [get_row(view, r).waits_for for r in (0, 2)] == [1, 3]
    assert [get_row(view, r).activity.waits_for for r in (0, 2)] == [1, 3]


def test_a_wait_in_an_unrecorded_group_counts_for_no_rank() -> None:
    view = build_view(job(rank(0, open=[collective(10, None, waiting_for=1, group=-1)]), rank(1)))
    assert (get_row(view, 0).waiting, get_row(view, 0).waits_for) == (1.0, -1)
    assert view.straggler is None


def test_an_overwritten_history_counts_for_the_time_that_it_covers() -> None:
    """The history has 20 operations in the last second, with 60% of waiting."""
    history = [collective(0.05 * i + 0.03, 0.05 * i, 0.03, 1) for i in range(20, -1, -1)]
    busy = rank(0, history=history, operations=100_000)
    assert get_row(build_view(job(busy, rank(1))), 0).waiting == pytest.approx(0.6, abs=0.02)
    assert get_row(build_view(job(busy, rank(1))), 0).operations == pytest.approx(20, rel=0.06)


def test_the_time_before_the_recorder_was_opened_does_not_count() -> None:
    new = rank(0, opened=ago(1), history=[collective(0.5, 0, 0.5, 1)])
    assert get_row(build_view(job(new, rank(1))), 0).waiting == pytest.approx(0.5)


def test_simultaneous_waits_count_once() -> None:
    posted = [message(4 - 0.1 * i, None, waiting_for=i % 2, number=i + 1) for i in range(20)]
    assert get_row(build_view(job(rank(0, open=posted), rank(1))), 0).waiting == pytest.approx(0.8)


def test_the_wait_of_a_message_is_at_its_end() -> None:
    """The message was posted 20 s ago; the rank waited in its last 2 s, within the window."""
    receiver = rank(0, history=[message(20, 1, 2, 1)])
    assert get_row(build_view(job(receiver, rank(1))), 0).waiting == pytest.approx(0.4)


def test_a_rank_with_a_posted_message_is_in_its_own_code() -> None:
    posted = get_row(
        build_view(job(rank(0, history=[collective(9, 8)], open=[message(4, None)]), rank(1))), 0
    )
    assert posted.waiting == 0
    assert not posted.activity.under_way
    assert posted.activity.num_other_operations == 1
    assert posted.activity.seconds == pytest.approx(4)


def test_a_waiting_operation_is_shown_before_an_older_one() -> None:
    both = rank(0, open=[message(30, None), collective(2, None, waiting_for=1)])
    activity = get_row(build_view(job(both, rank(1))), 0).activity
    assert activity.operation is not None
    assert activity.operation.kind == "all_reduce"
    assert (activity.num_other_operations, activity.waits_for) == (1, 1)
    assert activity.seconds == pytest.approx(2)


def test_the_last_operation_is_shown_for_a_rank_in_its_own_code() -> None:
    idle = rank(0, history=[collective(9, 8), collective(3, 2)])
    activity = get_row(build_view(job(idle, rank(1))), 0).activity
    assert not activity.under_way
    assert activity.seconds == pytest.approx(2)


def test_steps_per_second_refer_to_the_window() -> None:
    slow_then_fast = [(20.0, 1, 1.0), (10.0, 2, 1.0), *((4 - i / 4, 3 + i, 1.0) for i in range(17))]
    assert build_row_with_reports(*slow_then_fast).steps == pytest.approx(4)


def test_the_rate_of_rare_steps_is_that_of_the_last_two() -> None:
    assert build_row_with_reports((50, 1, 1), (30, 2, 1), (10, 3, 1)).steps == pytest.approx(0.05)


def test_steps_per_second_fall_without_new_steps() -> None:
    assert build_row_with_reports((41, 1, 1), (40, 2, 1)).steps == pytest.approx(1 / 41)


def test_a_reset_step_counter_is_not_a_step_back() -> None:
    assert build_row_with_reports(
        (4, 99, 1), (3, 100, 1), (2, 1, 1), (1, 2, 1)
    ).steps == pytest.approx(1)
    assert build_row_with_reports((2, 100, 1), (1, 1, 1)).steps is None


def test_reports_without_a_step() -> None:
    with_loss = build_row_with_reports((3, 7, 1.0), (2, 8, 1.0), (1, -1, None))
    assert (with_loss.step, with_loss.loss) == (8, 1.0)
    assert with_loss.steps == pytest.approx(1)
    assert build_row_with_reports((1, -1, None)).step is None


def test_a_rank_that_reports_nothing_has_no_progress() -> None:
    silent = build_row_with_reports()
    assert (silent.step, silent.steps, silent.loss) == (None, None, None)


def test_a_nan_loss_is_shown() -> None:
    losses = [(9 - step, step, 1.0 if step < 6 else math.nan) for step in range(9)]
    assert math.isnan(build_row_with_reports(*losses).loss or 0.0)


def test_the_last_given_loss_is_shown() -> None:
    losses = [(9 - step, step, float(step) if step % 3 == 0 else None) for step in range(9)]
    assert build_row_with_reports(*losses).loss == 6.0


def test_a_loss_that_was_never_given() -> None:
    assert build_row_with_reports((2, 1, None), (1, 2, None)).loss is None


def test_json_is_strict_and_escaped() -> None:
    special = rank(
        0, reports=(Report(ago(1), 3, math.inf),), history=[collective(3, 2, site="\x1b[2J")]
    )
    made = job(special, rank(1, problem="bad\u202e"), problems=("\x07",))
    text = json.dumps(as_json(made, build_view(made)), allow_nan=False)
    assert text.isascii()
    assert text.isprintable()
    read = json.loads(text)
    assert read["ranks"][0]["loss"] == "inf"
    assert read["ranks"][0]["operation"]["site"] == "\x1b[2J"


def test_json_names_the_straggler() -> None:
    made = build_straggling_job(4, 3)
    read = json.loads(json.dumps(as_json(made, build_view(made)), allow_nan=False))
    assert (read["balance"], read["straggler"]["rank"], read["world_size"]) == ("straggler", 3, 4)
    assert read["straggler"]["waiting"] == [0, 1, 2]
    assert read["ranks"][0]["waits"] == {"3": pytest.approx(0.6, abs=0.01)}


def build_ended_rank(number: int, **more: object) -> Rank:
    return replace(rank(number, state="gone"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (job(rank(0), rank(1)), None),
        (job(build_ended_rank(0), rank(1)), None),
        (job(), None),
        # The launcher may start another attempt.
        (job(build_ended_rank(0), build_ended_rank(1), launcher=1), None),
        (
            job(build_ended_rank(0), build_ended_rank(1), launcher=1, launcher_lost=True),
            (True, "ended: all its processes have exited"),
        ),
        (job(build_ended_rank(0), build_ended_rank(1), code=0), (True, "completed")),
        (
            job(build_ended_rank(0), build_ended_rank(1), code=137),
            (False, "failed with exit code 137"),
        ),
        (
            job(build_ended_rank(0, ending="exited"), build_ended_rank(1, ending="exited")),
            (True, "ended: all its processes have exited"),
        ),
        (
            job(build_ended_rank(0, ending="exited"), build_ended_rank(1)),
            (False, "failed: rank 1 (pid 4001) disappeared"),
        ),
        (
            job(build_ended_rank(0, ending="failed"), build_ended_rank(1)),
            (False, "failed: rank 0 (pid 4000) raised an exception"),
        ),
        (
            job(
                build_ended_rank(0, ending="failed", exception="KeyboardInterrupt"),
                build_ended_rank(1, ending="exited"),
            ),
            (False, "was interrupted"),
        ),
        (
            job(build_ended_rank(0, start=Start(4000, 0.0, 1.0, -11))),
            (False, "failed: rank 0 (pid 4000) was killed by SIGSEGV"),
        ),
    ],
)
def test_the_outcome_of_a_job(made: Job, expected: tuple[bool, str] | None) -> None:
    found = get_outcome(made)
    if expected is None or found is None:
        assert found == expected
    else:
        assert found[0] is expected[0]
        assert found[1].startswith(expected[1])


def test_a_rank_on_another_machine_has_no_process_here() -> None:
    remote = rank(1, state=None)
    view = build_view(job(rank(0), remote))
    assert (view.rows[1].state, view.rows[1].memory) == ("on another host", None)


def test_a_stopped_rank_does_not_wait() -> None:
    waiting = [rank(r, open=[collective(60, None, waiting_for=1 - r)]) for r in range(2)]
    stopped = replace(waiting[1], process=Process("stopped"))
    view = build_view(job(waiting[0], stopped))
    assert view.rows[1].is_abnormal
    assert view.rows[1].waiting is None
    assert view.balance == "straggler"
    assert view.straggler is not None
    assert view.straggler.rank == 1


def test_an_ended_job_has_no_straggler() -> None:
    dead = [rank(r, state="gone", open=[collective(60, None, waiting_for=1 - r)]) for r in range(2)]
    view = build_view(job(*dead))
    assert (view.balance, view.straggler) == ("ended", None)
