"""The words, the table and the JSON of an explanation."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from phalanx.observe import job_reader
from phalanx.observe.diagnosis import Kind
from phalanx.observe.explain import as_json, as_text, explain
from phalanx.observe.explain.formatting import (
    collapse_numbers,
    format_duration,
    format_ranks,
    format_time,
    join_texts,
)
from phalanx.observe.model import Job
from tests.made_up import SECOND, Story


def first_lines(story: Story) -> list[str]:
    """The diagnosis's own lines: those between the headline and the table."""
    return as_text(story.job()).split("\n\n")[1].splitlines()


def table(story: Story) -> list[str]:
    lines = as_text(story.job()).splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.lstrip().startswith("rank ")) :]


def busy(size: int = 3, seconds: float = 34) -> Story:
    return Story(size).together(2).begins([0, 2], waiting_for=1).passes(seconds).runs(1)


def test_the_diagnosis_comes_first_with_who_why_since_when_and_where() -> None:
    first, second = first_lines(busy())
    assert first.startswith("Rank 1 (pid 801) has been in code of its own for 34 s (since ")
    assert "after all_reduce #2 float32[10] SUM at train.py:40" in first
    assert first.endswith("its process is running: a long computation, or an endless loop.")
    assert second.startswith(
        "Ranks 0 and 2 wait for rank 1 in all_reduce #3 float32[10] SUM at train.py:40 for 34 s"
    )


def test_what_is_over_is_told_in_the_past() -> None:
    story = busy().ends([0, 2], "timeout").fails([0, 2], "CollectiveTimeout: rank 1 is alive")
    first, second = first_lines(story.launcher_stops())
    assert "Rank 1 (pid 801) had been in code of its own for 34 s" in first
    assert "its process" not in first
    assert second.startswith("Ranks 0 and 2 waited for rank 1 in all_reduce #3")


def test_a_killed_rank_with_its_last_step() -> None:
    story = Story(2).together().reports([1], 17).begins(0, waiting_for=1).passes(2).dies(1, -9)
    story.reports([1], -1)  # of the loss alone
    (first, second) = first_lines(story.passes(0.01).ends(0, "peer_lost"))
    assert first.startswith("Rank 1 (pid 801) was killed by SIGKILL at ")
    assert first.endswith(
        "in code of its own after all_reduce #1 float32[10] SUM at train.py:40, step 17."
    )
    assert second.startswith("Rank 0 waited for rank 1 in all_reduce #2")
    text = as_text(story.job())
    assert "when memory ran out" in text
    assert "journalctl -k" in text


def test_a_branch_names_both_call_sites() -> None:
    story = Story(4).together().begins([0, 1, 3], site="/a/train.py:40")
    story.begins(2, "barrier", site="/a/evaluate.py:12").passes(0.1).ends(outcome="mismatch")
    (line,) = first_lines(story)
    assert line.startswith("Rank 2 (pid 802) took another branch than the others at ")
    assert "it called barrier #2 at evaluate.py:12, but ranks 0, 1, 3 called all_reduce #2" in line
    assert line.endswith("float32[10] SUM at train.py:40.")


def test_an_unsent_message_names_both_ranks_and_what_was_sent_instead() -> None:
    story = Story(3).together().begins(0, "send", peer=1, tag=8, site="a.py:7").ends(0)
    story.begins(1, "recv", peer=0, tag=7, site="a.py:9").begins(0, "barrier", waiting_for=1)
    first, second, third = first_lines(story.passes(12))
    assert "Rank 1 (pid 801) waits for a message that nobody sends" in first
    assert "recv float32[10] from rank 0 tag 7 at a.py:9, for 12 s" in first
    assert second == "Rank 0 (pid 800) is elsewhere, in barrier #2 at train.py:40."
    assert third.endswith("nobody asked for: send float32[10] to rank 1 tag 8 at a.py:7.")


def test_messages_name_ranks_of_the_job() -> None:
    """In a group of some ranks, a rank has another number than in the job."""
    story = Story(6, groups={"0": range(6), "half": (1, 3, 5)}).together(group="half")
    story.begins(5, "recv", "half", peer=3).passes(20)
    assert 'recv float32[10] from rank 3 in group "half" at train.py:40' in as_text(story.job())


def test_groups_in_different_orders() -> None:
    story = Story(3, groups={"a": range(3), "b": range(3)}).together(group="b")
    story.begins([0, 2], group="a", site="x.py:1", waiting_for=1)
    first, second, third = first_lines(story.begins(1, group="b", site="x.py:2").passes(9))
    assert 'rank 1 is in all_reduce #2 float32[10] SUM in group "b" at x.py:2' in first
    assert 'ranks 0 and 2 are in all_reduce #1 float32[10] SUM in group "a" at x.py:1' in first
    assert second.startswith("Each side waits for the other for 9.0 s")
    assert third == "Rank 1 (pid 801) is in the minority."


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "an endless loop"),
        ("sleeping", "waits for something outside of Phalanx"),
        ("disk", "on a disk or a network file system"),
    ],
)
def test_what_the_process_does(state: str, words: str) -> None:
    story = busy()
    story.ranks[1].state = state
    assert words in first_lines(story)[0]
    assert "py-spy dump --pid 801" in as_text(story.job())


def test_what_speaks_for_a_rank_that_is_only_slow() -> None:
    story = Story(2).together().passes(7).together().begins(0, waiting_for=1).passes(3)
    assert "Its longest such pause before was 7.0 s." in first_lines(story)


@pytest.mark.parametrize("size", (2, 8))
def test_a_row_for_each_of_a_few_ranks(size: int) -> None:
    rows = table(Story(size).together().begins(range(1, size), waiting_for=0).passes(5))[2:]
    assert [row.split()[:2] for row in rows[:size]] == [[str(n), str(800 + n)] for n in range(size)]


@pytest.mark.parametrize("size", (9, 64, 512))
def test_many_ranks_in_the_same_state_share_a_row(size: int) -> None:
    others = [number for number in range(size) if number != 4]
    story = Story(size).together().reports(range(6), 16).reports(range(6, size), 17)
    rows = table(story.begins(others, waiting_for=4).passes(5))
    assert rows[2].split()[:3] == ["0-3,", f"5-{size - 1}", "waits"]
    assert rows[2].endswith("16, 17")
    assert rows[3].split()[:3] == ["4", "own", "code"]
    assert rows[4] == ""


def test_hundreds_of_ranks_in_different_states_do_not_flood_the_terminal() -> None:
    story = Story(300).together()
    for rank in range(299):
        story.begins(rank, site=f"train.py:{rank}", waiting_for=299)
    lines = as_text(story.passes(5).job()).splitlines()
    assert len(lines) < 90
    assert any("and 236 more: phalanx explain --json lists all" in line for line in lines)
    assert any(line.split()[:1] == ["299"] for line in lines), "the culprit is always shown"


@pytest.mark.parametrize("size", (2, 8, 64))
def test_the_table_fits_80_columns(size: int) -> None:
    story = Story(size).together().reports(range(size), 16).begins(range(1, size), waiting_for=0)
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True).print(explain(story.passes(345).job()))
    lines = [re.sub("\x1b[^m]*m", "", line) for line in out.getvalue().splitlines()]
    assert max(len(line) for line in lines) <= 80
    names = next(line for line in lines if line.split()[:1] == ["rank"])
    assert names.split()[-5:] == "operation called at since step".split()
    rows = [line for line in lines if "#2" in line and "5 min 45 s" in line and "16" in line]
    assert len(rows) == (1 if size == 64 else size - 1), "no row is wrapped"
    at_fault = next(line for line in out.getvalue().splitlines() if "own code  " in line)
    assert "\x1b[1;31m" in at_fault


HOSTILE = "\x1b]0;owned\x07\u202e[bold]x[/bold]\nRank 0 is fine"
PLANTS: dict[str, Callable[[Job], Job]] = {
    "name": lambda job: replace(job, name=HOSTILE),
    "command": lambda job: replace(job, command=(HOSTILE,)),
    "problems": lambda job: replace(job, problems=(HOSTILE,)),
}
for name in ("host", "exception", "problem", "note"):
    PLANTS[name] = lambda job, name=name: replace(
        job, ranks=tuple(replace(rank, **{name: HOSTILE}) for rank in job.ranks)
    )
for name in ("kind", "dtype", "op", "site", "outcome"):
    PLANTS[f"operation's {name}"] = lambda job, name=name: replace(
        job,
        ranks=tuple(
            replace(
                rank,
                open=tuple(replace(o, **{name: HOSTILE}) for o in rank.open),
                history=tuple(replace(o, **{name: HOSTILE}) for o in rank.history),
            )
            for rank in job.ranks
        ),
    )
for name in ("name", "left_at", "why"):
    PLANTS[f"group's {name}"] = lambda job, name=name: replace(
        job,
        ranks=tuple(
            replace(rank, groups=tuple(replace(group, **{name: HOSTILE}) for group in rank.groups))
            for rank in job.ranks
        ),
    )


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("end", ("busy", "failed", "left", "aborted"))
def test_hostile_texts_are_escaped(plant: str, end: str) -> None:
    story = Story(3, groups={"0": range(3), "1": range(3)}).together()
    story.begins([0, 2], waiting_for=1).passes(5)
    if end == "failed":
        story.fails(1, "KeyError").ends([0, 2], "peer_lost")
    elif end != "busy":
        story.leaves(1, why="because" if end == "aborted" else "").ends([0, 2], end)
    job = PLANTS[plant](story.job())
    text = as_text(job)
    assert all(line.isprintable() for line in text.split("\n"))
    assert "\nRank 0 is fine" not in text
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(explain(job))
    assert "\x1b" not in out.getvalue(), "no markup either"
    assert "\x1b" not in json.dumps(as_json(job))


def test_json_has_what_the_page_promises() -> None:
    story = busy().reports([0], 17)
    found = as_json(story.job())
    assert list(found) == ["version", "job", "verdict", "ranks", "advice", "problems", "workers"]
    assert found["job"]["running"] is True
    diagnosis = found["verdict"]
    assert (diagnosis["kind"], diagnosis["ranks"]) == ("busy", [1])
    assert diagnosis["text"] == first_lines(story)
    assert diagnosis["waiting"][0]["ranks"] == [0, 2]
    operation = diagnosis["waiting"][0]["operation"]
    assert operation["site"] == "/srv/job/train.py:40"
    assert operation["end"] is None
    assert abs(found["ranks"][1]["since"] - (story.unix - 34)) < 0.1
    assert [rank["waits_for"] for rank in found["ranks"]] == [[1], [], [1]]
    assert found["ranks"][0]["step"] == 17


def test_what_ranks_noted_is_shown() -> None:
    job = busy().job()
    assert " note" not in as_text(job)
    noted = replace(job.ranks[1], note="evaluating\x1b")
    job = replace(job, ranks=(job.ranks[0], noted, job.ranks[2]))
    row = next(line for line in as_text(job).splitlines() if "own code  " in line)
    assert row.endswith('"evaluating\\x1b"')
    assert as_json(job)["ranks"][1]["note"] == "evaluating\x1b"
    dead = Story(3).together().begins([0, 2], waiting_for=1).passes(1).dies(1, -9).passes(0.1)
    dead.ends([0, 2], "peer_lost")
    job = dead.job()
    job = replace(job, ranks=(job.ranks[0], replace(job.ranks[1], note="saving"), job.ranks[2]))
    assert 'train.py:40, "saving".' in as_text(job)


def test_notes_of_many_ranks_share_a_row() -> None:
    story = Story(16).together().begins([n for n in range(16) if n != 3], waiting_for=3).passes(5)
    job = story.job()
    same = replace(job, ranks=tuple(replace(rank, note="evaluating") for rank in job.ranks))
    assert as_text(same).count('"evaluating"') == 2
    differing = tuple(replace(rank, note=f"shard {rank.rank}") for rank in job.ranks)
    text = as_text(replace(job, ranks=differing))
    assert "several" in text
    assert '"shard 3"' in text


def test_problems_are_shown() -> None:
    story = busy()
    story.ranks[2].problem = "damaged: 7 bytes"
    text = as_text(replace(story.job(), problems=("launcher.jsonl: line 3 is cut off",)))
    assert "Note: launcher.jsonl: line 3 is cut off" in text
    assert "Note: rank 2: damaged: 7 bytes" in text
    assert "flight recorder unreadable" in text


def test_a_job_that_runs_well_has_nothing_to_try() -> None:
    text = as_text(Story(2).together().job())
    assert "Nothing is wrong" in text
    assert "What to try" not in text


def test_a_job_whose_ranks_have_not_met_yet() -> None:
    (line,) = first_lines(Story(3, joined=()))
    assert line == "No rank has come to form a group yet; 3 processes have been started."


def test_ranks_that_end_before_they_meet() -> None:
    story = Story(3, joined=()).passes(1).dies(2, 1).passes(0.1).dies(0, 1).launcher_stops()
    (line,) = first_lines(story)
    assert line.startswith("Rank 2 (pid 802) ended with exit code 1")
    assert line.endswith(", before it joined any group.")


def test_the_page_lists_what_json_has(repository: Path) -> None:
    page = (repository / "docs" / "when-a-job-hangs-or-dies.md").read_text()
    text = page.partition("## For programs")[2]
    assert set(re.findall(r"`(\w+)`", text.partition("`kind` is one of")[2].partition(".")[0])) == {
        *get_args(Kind)
    }
    story = busy().reports([0], 17)
    found = as_json(story.job())
    operation = found["verdict"]["waiting"][0]["operation"]
    parts = [found["job"], found["verdict"], found["ranks"][0], operation]
    for key in [*found, *(key for part in parts for key in part)]:
        assert re.search(rf"\b{key}\b", text), key


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 0, 2], "0-2"),
        ([0, 2, 3, 9], "0, 2, 3, 9"),
        ([7, 3, 4, 5], "3-5, 7"),
        ([5, 5], "5"),
    ],
)
def test_collapsed(numbers: list[int], text: str) -> None:
    assert collapse_numbers(numbers) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (34.4, "34 s"),
        (60, "1 min"),
        (303, "5 min 3 s"),
        (7440, "2 h 4 min"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert format_duration(int(seconds * SECOND)) == text


def test_lists_and_names() -> None:
    assert [join_texts(["a", "b", "c"][:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([2, 0]) == "ranks 0 and 2"
    assert format_ranks([0, 1, 2, 7]) == "ranks 0-2, 7"


@pytest.mark.parametrize("time", (10**30, -(10**30)))
def test_times_that_no_calendar_has(time: int) -> None:
    assert format_time(time) == "?"


def test_a_job_whose_start_is_not_known(jobs: Path) -> None:
    """A launcher that failed between making the directory and describing it leaves such a job."""
    name = "20261122-2159-8nezfx"
    jobs.mkdir(mode=0o700)
    (jobs / name).mkdir(mode=0o700)
    job = job_reader.read_job(name)
    assert "1970" not in as_text(job)
    assert as_json(job)["job"]["started"] is None
