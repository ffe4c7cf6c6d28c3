"""The table of `phalanx watch`: readable with 2 and with 64 ranks, on any terminal."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from phalanx.diagnosis.model import Job, Link, Operation, Process, Rank, Report
from phalanx.diagnosis.watch import as_json, build_view, get_outcome
from phalanx.diagnosis.watch_table import describe_activity, fold, render
from tests import arbitrary_jobs
from tests.synthetic_jobs import ago, build_straggling_job, collective, job, message, rank

HOSTILE = "\x1b]0;owned\x07\x1b[2J\n\r\x9b31m\u202eevil\u2066\u200b\ud800 [bold]x[/]"


def lines(made: Job, width: int = 120, height: int | None = None) -> list[str]:
    """Return the lines of the table for a terminal of that size, without styles."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(made, build_view(made), console, height))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in written.splitlines()]


def cells(made: Job, width: int = 200) -> dict[str, str]:
    """Return the cells of rank 0 by column heading."""
    shown = lines(made, width)
    at = next(i for i, line in enumerate(shown) if line.startswith("rank  "))
    names = re.split(r"\s{2,}", shown[at].strip())
    values = re.split(r"\s{2,}", shown[at + 1].strip(), maxsplit=len(names) - 1)
    return dict(zip(names, values, strict=True))


def get_rank_lines(shown: list[str]) -> dict[int, str]:
    """Return the lines of single ranks by rank."""
    head = next(i for i, line in enumerate(shown) if line.startswith("rank "))
    found = (re.match(r" {0,3}(\d+) ", line) for line in shown[head + 1 :])
    return {int(match[1]): match.string for match in found if match}


def get_shown_ranks(shown: list[str]) -> set[int]:
    """Return the ranks that a table shows, in their own lines or in folds."""
    found = set(get_rank_lines(shown))
    for line in shown:
        if line.startswith("... and "):
            assert not line.endswith("…"), "cut"
            numbers = re.split(r", ranks? ", line)[1]
            for run in re.split(r", | and ", numbers):
                first, _, last = run.partition("-")
                found |= set(range(int(first), int(last or first) + 1))
    return found


def test_a_loss_without_a_step_is_shown() -> None:
    made = job(rank(0, 2, [collective(4, 3)], reports=(Report(ago(1), -1, 0.25),)), rank(1))
    shown = cells(made)
    assert shown["loss"] == "0.25"
    assert "ops/s" in shown
    assert "step" not in shown
    assert not any("No progress is reported" in line for line in lines(made))


@pytest.mark.parametrize("state", ["running", "gone"])
def test_the_note_of_a_rank_is_shown_with_its_activity(state: str) -> None:
    history, note = [collective(4, 3)], "evaluating\x1b[2J"
    made = job(rank(0, 2, history, state=state, note=note), rank(1, 2, history))
    assert '"evaluating\\x1b[2J"' in cells(made)["activity"]
    open_ = [collective(2, None, waiting_for=1, sequence=42)]
    waiting = job(rank(0, 2, history, open_, note="x" * 300), rank(1, 2, history))
    assert '2.0 s, "xxx' in cells(waiting)["activity"]
    assert "x" * 61 not in cells(waiting)["activity"]
    assert as_json(waiting, build_view(waiting))["ranks"][0]["note"] == "x" * 300


def test_a_row_describes_a_rank() -> None:
    history = [collective(4, 3, 1, 1)]
    open_ = [collective(2, None, waiting_for=1, sequence=42), message(1, None, peer=1)]
    reports = tuple(Report(ago(5 - i), 100 + i, 1 / 8) for i in range(5))
    shown = cells(job(rank(0, 2, history, open_, "sleeping", reports=reports), rank(1)))
    assert shown == {
        "rank": "0",
        "step": "104",
        "steps/s": "1",
        "loss": "0.125",
        "waiting": "60% for 1",
        "memory": "300 MiB",
        "process": "sleeping",
        "activity": "all_reduce at train.py:40, waits for 1, 2.0 s, #42, float32[1024] SUM, "
        "1 more under way",
    }


@pytest.mark.parametrize(
    ("history", "text"),
    [
        ([collective(4, 3, 1, 1)], "20% for 1"),
        ([collective(4, 3, 1, 1), collective(3, 2, 0.5, 2)], "30% (20% for 1)"),
        ([collective(4, 3, 1, 1, group=-1)], "20%"),
        ([], "0%"),
    ],
)
def test_the_ranks_that_a_rank_waits_for(history: list[Operation], text: str) -> None:
    assert cells(job(rank(0, 3, history), rank(1, 3), rank(2, 3)))["waiting"] == text


def test_without_reports_operations_are_counted_and_report_is_suggested() -> None:
    made = job(rank(0, history=[collective(t, t - 0.1) for t in (3, 2, 1)]), rank(1))
    assert cells(made)["ops/s"] == "0.6"
    assert "phalanx.report(step=..., loss=...)" in "\n".join(lines(made))
    assert "step" not in cells(made)


def test_a_rank_without_an_operation_is_in_its_own_code() -> None:
    made = job(rank(0, history=[collective(3, 2)]), rank(1))
    assert cells(made)["activity"] == "own code, 2.0 s, after all_reduce at train.py:40"


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (message(1, None, 0, 1), "recv from 1 at train.py:40, waits for 1, 1.0 s, tag 7, float32"),
        (message(1, None), "own code, 1.0 s, 1 more under way"),
        (message(1, None, peer=-1), "recv from any at train.py:40"),
        (message(1, None, 0, 1, kind="send"), "send to 1 at train.py:40"),
        (collective(1, None, kind="broadcast", peer=1), "broadcast from 1 at"),
        (collective(1, None, kind="join", site=""), "join, 1.0 s"),
    ],
)
def test_descriptions_of_operations(operation: Operation, text: str) -> None:
    view = build_view(job(rank(0, open=[operation]), rank(1)))
    assert describe_activity(view.rows[0]).startswith(text)


def test_the_summary_names_the_straggler_and_its_activity() -> None:
    top = " ".join(lines(build_straggling_job(8, 3))[1:2])
    assert top.startswith(
        "Rank 3 delays the others: 7 ranks wait for it 60% of the time (own code,"
    )
    assert "after all_reduce at train.py:40" in top


def test_the_summary_of_a_balanced_job() -> None:
    assert "Balanced" in lines(job(rank(0), rank(1)))[1]


def test_the_summary_of_a_stuck_job_refers_to_explain() -> None:
    cycle = [rank(r, 2, open=[message(60, None, waiting_for=1 - r)]) for r in range(2)]
    made = job(*cycle)
    assert f"phalanx explain {made.name}" in "\n".join(lines(made, 200))


@pytest.mark.parametrize("size", [2, 8, 16, 17, 18, 64])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 30), (200, 60), (80, 12)])
def test_the_table_fits_the_terminal_and_accounts_for_every_rank(
    size: int, width: int, height: int
) -> None:
    shown = lines(build_straggling_job(size, slow=1), width, height)
    assert len(shown) <= height
    assert max(map(len, shown)) <= width
    assert get_shown_ranks(shown) == set(range(size))
    assert 1 in get_rank_lines(shown), "the straggler has a line of its own"


def test_folded_ranks_are_counted_with_their_state() -> None:
    shown = lines(build_straggling_job(64, slow=3), 80, 24)
    counted = next(line for line in shown if line.startswith("... and "))
    assert re.match(
        r"\.\.\. and \d\d more waiting for rank 3, 60% of their time, step 20, ranks ", counted
    )


def test_abnormal_ranks_keep_their_lines() -> None:
    made = build_straggling_job(64, slow=3)
    bad = {
        40: replace(made.ranks[40], process=Process("stopped")),
        50: replace(made.ranks[50], process=Process("gone")),
        63: Rank(63),
    }
    ranks = tuple(bad.get(one.rank, one) for one in made.ranks)
    shown = lines(replace(made, ranks=ranks), 100, 16)
    assert {3, 40, 50, 63} <= set(get_rank_lines(shown))
    assert get_shown_ranks(shown) == set(range(64))


def test_many_states_are_folded_into_few_lines() -> None:
    """Each of 64 ranks waits for another, so that no two ranks have the same state."""
    cycle = [rank(r, 64, open=[message(60, None, waiting_for=(r + 1) % 64)]) for r in range(64)]
    view = build_view(job(*cycle))
    shown, folds = fold(view, 10)
    assert len(shown) + len(folds) == 10
    assert {row.rank for row in shown} | {row.rank for one in folds for row in one.rows} == set(
        range(64)
    )
    assert folds[-1].state == "in other states"


def test_texts_are_wrapped_or_visibly_truncated() -> None:
    site = "/srv/code/a_script_with_a_name_that_is_long.py:40"
    few = [rank(r, 2, open=[collective(2, None, waiting_for=1, site=site)]) for r in range(2)]
    assert "#41" in "".join(lines(job(*few), 80, 24))
    many = [rank(r, 16, open=[collective(2, None, waiting_for=1, site=site)]) for r in range(16)]
    shown = get_rank_lines(lines(job(*many), 80, 24))
    assert len(shown) == 16
    assert all(line.endswith("…") for line in shown.values())


def test_texts_of_the_job_are_escaped() -> None:
    hostile = rank(
        0,
        open=[collective(1, None, kind=HOSTILE, site=HOSTILE, waiting_for=1)],
        problem="",
        groups=tuple(replace(group, name=HOSTILE) for group in rank(0).groups * 2),
    )
    broken = rank(1, problem=HOSTILE)
    made = job(hostile, broken, command=(HOSTILE,), problems=(HOSTILE,))
    for text in lines(replace(made, name=HOSTILE), 200):
        assert text.isprintable(), repr(text)
    assert any("[bold]x[/]" in text for text in lines(made, 200)), "not taken for markup"


@given(
    made=arbitrary_jobs.jobs(),
    width=st.integers(20, 250),
    height=st.none() | st.integers(1, 60),
    window=st.floats(0.1, 3600),
)
def test_any_job_can_be_rendered(made: Job, width: int, height: int | None, window: float) -> None:
    view = build_view(made, window)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(made, view, console, height))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.replace("\n", "").isprintable()
    json.loads(json.dumps(as_json(made, view), allow_nan=False))
    get_outcome(made)
    for row in view.rows:
        assert row.waiting is None or 0 <= row.waiting <= 1


@given(made=arbitrary_jobs.jobs(), room=st.integers(1, 80))
def test_folding_loses_no_rank(made: Job, room: int) -> None:
    view = build_view(made)
    shown, folds = fold(view, room)
    assert len(shown) + len(folds) <= room
    found = [row.rank for row in shown] + [row.rank for one in folds for row in one.rows]
    assert sorted(found) == list(range(len(made.ranks)))


def test_links_and_progress() -> None:
    link = Link(
        "node-b", (1_200_000_000, 310_000_000, ago(0.1)), (1_152_400_000, 300_000_000, ago(4))
    )
    operation = collective(3, None, waiting_for=1, progress=48)
    made = job(rank(0, open=[operation], links=(link,)), rank(1))
    shown = lines(made)
    expected = "Link to node-b: sends 11.9 MB/s, receives 2.5 MB/s; so far 1.2 GB and 310 MB"
    assert expected in shown
    assert "train.py:40, 48% done, waits for 1" in get_rank_lines(shown)[0]
    (found,) = as_json(made, build_view(made))["links"]
    assert (found["host"], found["peer"], found["sent"]) == ("node-a", "node-b", 1_200_000_000)
    assert found["send_rate"] == pytest.approx(11.9e6)


def test_links_of_many_hosts() -> None:
    links = tuple(Link(f"node-{n}", (n, 0, ago(1)), (0, 0, ago(2))) for n in range(20))
    shown = lines(job(rank(0, links=links), rank(1, host=HOSTILE, links=links[:1])))
    found = [line for line in shown if line.startswith("Link ")]
    assert len(found) == 7
    assert "... and 14 more links" in shown
    assert (
        found[0] == "Link from node-a to node-19: sends 10 B/s, receives 0 B/s; so far 19 B and 0 B"
    )
