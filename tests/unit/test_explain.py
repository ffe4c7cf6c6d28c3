"""The sentences, the table and the JSON of an explanation."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.diagnosis import job_reader
from phalanx.diagnosis.explain import as_json, as_text, explain
from phalanx.diagnosis.formatting import (
    collapse_numbers,
    format_duration,
    format_ranks,
    format_time,
    join_texts,
)
from phalanx.diagnosis.kinds import KINDS
from phalanx.diagnosis.model import Job
from tests.synthetic_jobs import SECOND, JobBuilder


def first_lines(builder: JobBuilder) -> list[str]:
    """Return the sentences of the diagnosis, between the headline and the table."""
    return as_text(builder.build()).split("\n\n")[1].splitlines()


def table(builder: JobBuilder) -> list[str]:
    lines = as_text(builder.build()).splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.lstrip().startswith("rank ")) :]


def busy(size: int = 3, seconds: float = 34) -> JobBuilder:
    return (
        JobBuilder(size)
        .run_collectives(2)
        .begin([0, 2], waiting_for=1)
        .advance(seconds)
        .set_running(1)
    )


def test_the_diagnosis_comes_first_with_rank_cause_time_and_location() -> None:
    first, second = first_lines(busy())
    assert first.startswith("Rank 1 (pid 801) has been in its own code for 34 s (since ")
    assert "after all_reduce #2 float32[10] SUM at train.py:40" in first
    assert first.endswith("its process is running: a long computation or an endless loop.")
    assert second.startswith(
        "Ranks 0 and 2 have waited for rank 1 in all_reduce #3 float32[10] SUM at train.py:40 for "
        "34 s"
    )


def test_the_headline_between_two_attempts() -> None:
    job = JobBuilder(2).run_collectives(2).exit(0).exit(1).build()
    for launcher_lost, state in ((False, ", running)"), (True, ", ended)")):
        text = as_text(replace(job, launcher=700, launcher_lost=launcher_lost))
        assert state in text.splitlines()[0]


def test_past_failures_are_described_in_the_past_tense() -> None:
    builder = busy().end([0, 2], "timeout").fail([0, 2], "CollectiveTimeout: rank 1 is alive")
    first, second = first_lines(builder.stop_job())
    assert "Rank 1 (pid 801) had been in its own code for 34 s" in first
    assert "its process" not in first
    assert second.startswith("Ranks 0 and 2 waited for rank 1 in all_reduce #3")


def test_a_killed_rank_with_its_last_step() -> None:
    builder = (
        JobBuilder(2)
        .run_collectives()
        .report([1], 17)
        .begin(0, waiting_for=1)
        .advance(2)
        .end_process(1, -9)
    )
    builder.report([1], -1)  # of the loss alone
    (first, second) = first_lines(builder.advance(0.01).end(0, "peer_lost"))
    assert first.startswith("Rank 1 (pid 801) was killed by SIGKILL at ")
    assert first.endswith(
        "in its own code after all_reduce #1 float32[10] SUM at train.py:40, step 17."
    )
    assert second.startswith("Rank 0 waited for rank 1 in all_reduce #2")
    text = as_text(builder.build())
    assert "because memory ran out" in text
    assert "journalctl -k" in text


def test_a_branch_names_both_call_sites() -> None:
    builder = JobBuilder(4).run_collectives().begin([0, 1, 3], site="/a/train.py:40")
    builder.begin(2, "barrier", site="/a/evaluate.py:12").advance(0.1).end(outcome="mismatch")
    (line,) = first_lines(builder)
    assert line.startswith("Rank 2 (pid 802) took a different branch than the others at ")
    assert "it called barrier #2 at evaluate.py:12, but ranks 0, 1, 3 called all_reduce #2" in line
    assert line.endswith("float32[10] SUM at train.py:40.")


def test_different_sizes_at_one_line() -> None:
    builder = JobBuilder(4).run_collectives().begin([0, 1, 3], count=4).begin(2, count=3)
    report = builder.advance(0.1).end(outcome="mismatch")
    (line,) = first_lines(report)
    assert line.startswith("Ranks gave all_reduce #2 at train.py:40 tensors of different sizes at ")
    assert line.endswith(": rank 2 float32[3] and ranks 0, 1, 3 float32[4].")
    assert "pad it" in as_text(report.build())


def test_an_unsent_message_names_both_ranks_and_the_message_sent_instead() -> None:
    builder = JobBuilder(3).run_collectives().begin(0, "send", peer=1, tag=8, site="a.py:7").end(0)
    builder.begin(1, "recv", peer=0, tag=7, site="a.py:9").begin(0, "barrier", waiting_for=1)
    first, second, third = first_lines(builder.advance(12))
    assert "Rank 1 (pid 801) has waited for a message that no rank sends" in first
    assert "recv float32[10] from rank 0 tag 7 at a.py:9, for 12 s" in first
    assert second == "Rank 0 (pid 800) is elsewhere, in barrier #2 at train.py:40."
    assert third.endswith(
        "sent instead has no matching recv: send float32[10] to rank 1 tag 8 at a.py:7."
    )


def test_messages_name_ranks_of_the_job() -> None:
    """A rank's number in a group of some ranks differs from its number in the job."""
    builder = JobBuilder(6, groups={"0": range(6), "half": (1, 3, 5)}).run_collectives(group="half")
    builder.begin(5, "recv", "half", peer=3).advance(20)
    assert 'recv float32[10] from rank 3 in group "half" at train.py:40' in as_text(builder.build())


def test_groups_in_different_orders() -> None:
    builder = JobBuilder(3, groups={"a": range(3), "b": range(3)}).run_collectives(group="b")
    builder.begin([0, 2], group="a", site="x.py:1", waiting_for=1)
    first, second, third = first_lines(builder.begin(1, group="b", site="x.py:2").advance(9))
    assert 'rank 1 is in all_reduce #2 float32[10] SUM in group "b" at x.py:2' in first
    assert 'ranks 0 and 2 are in all_reduce #1 float32[10] SUM in group "a" at x.py:1' in first
    assert second.startswith("Each side has waited for the other for 9.0 s")
    assert third == "Rank 1 (pid 801) is in the minority."


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("running", "a long computation or an endless loop"),
        ("sleeping", "waits for something outside of Phalanx"),
        ("disk", "blocked in the kernel, on a disk or a network file system"),
    ],
)
def test_the_process_state(state: str, text: str) -> None:
    builder = busy()
    builder.ranks[1].state = state
    assert text in first_lines(builder)[0]
    assert "py-spy dump --pid 801" in as_text(builder.build())


def test_earlier_pauses_of_a_slow_rank() -> None:
    builder = (
        JobBuilder(2)
        .run_collectives()
        .advance(7)
        .run_collectives()
        .begin(0, waiting_for=1)
        .advance(3)
    )
    assert "Its longest earlier pause was 7.0 s." in first_lines(builder)


@pytest.mark.parametrize("size", (2, 8))
def test_a_row_for_each_of_a_few_ranks(size: int) -> None:
    rows = table(
        JobBuilder(size).run_collectives().begin(range(1, size), waiting_for=0).advance(5)
    )[2:]
    assert [row.split()[:2] for row in rows[:size]] == [[str(n), str(800 + n)] for n in range(size)]


@pytest.mark.parametrize("size", (9, 64, 512))
def test_many_ranks_in_the_same_state_share_a_row(size: int) -> None:
    others = [number for number in range(size) if number != 4]
    builder = JobBuilder(size).run_collectives().report(range(6), 16).report(range(6, size), 17)
    rows = table(builder.begin(others, waiting_for=4).advance(5))
    assert rows[2].split()[:3] == ["0-3,", f"5-{size - 1}", "waits"]
    assert rows[2].endswith("16, 17")
    assert rows[3].split()[:3] == ["4", "own", "code"]
    assert rows[4] == ""


def test_hundreds_of_ranks_in_different_states_do_not_flood_the_terminal() -> None:
    builder = JobBuilder(300).run_collectives()
    for rank in range(299):
        builder.begin(rank, site=f"train.py:{rank}", waiting_for=299)
    lines = as_text(builder.advance(5).build()).splitlines()
    assert len(lines) < 90
    assert any("and 236 more: phalanx explain --json lists all" in line for line in lines)
    assert any(line.split()[:1] == ["299"] for line in lines), "the rank at fault is always shown"


@pytest.mark.parametrize("size", (2, 8, 64))
def test_the_table_fits_80_columns(size: int) -> None:
    builder = (
        JobBuilder(size)
        .run_collectives()
        .report(range(size), 16)
        .begin(range(1, size), waiting_for=0)
    )
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True).print(explain(builder.advance(345).build()))
    lines = [re.sub("\x1b[^m]*m", "", line) for line in out.getvalue().splitlines()]
    assert max(len(line) for line in lines) <= 80
    names = next(line for line in lines if line.split()[:1] == ["rank"])
    assert names.split()[-5:] == "operation called at since step".split()
    rows = [line for line in lines if "#2" in line and "5 min 45 s" in line and "16" in line]
    assert len(rows) == (1 if size == 64 else size - 1), "no row is wrapped"
    at_fault = next(line for line in out.getvalue().splitlines() if "own code  " in line)
    assert "\x1b[1;31m" in at_fault


HOSTILE = "\x1b]0;owned\x07\u202e[bold]x[/bold]\nRank 0 is fine"
INJECTIONS: dict[str, Callable[[Job], Job]] = {
    "name": lambda job: replace(job, name=HOSTILE),
    "command": lambda job: replace(job, command=(HOSTILE,)),
    "problems": lambda job: replace(job, problems=(HOSTILE,)),
}
for name in ("host", "exception", "problem", "note"):
    INJECTIONS[name] = lambda job, name=name: replace(
        job, ranks=tuple(replace(rank, **{name: HOSTILE}) for rank in job.ranks)
    )
for name in ("kind", "dtype", "op", "site", "outcome"):
    INJECTIONS[f"operation's {name}"] = lambda job, name=name: replace(
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
for name in ("name", "left_at", "abort_reason"):
    INJECTIONS[f"group's {name}"] = lambda job, name=name: replace(
        job,
        ranks=tuple(
            replace(rank, groups=tuple(replace(group, **{name: HOSTILE}) for group in rank.groups))
            for rank in job.ranks
        ),
    )


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize("end", ("busy", "failed", "left", "aborted"))
def test_hostile_texts_are_escaped(injection: str, end: str) -> None:
    builder = JobBuilder(3, groups={"0": range(3), "1": range(3)}).run_collectives()
    builder.begin([0, 2], waiting_for=1).advance(5)
    if end == "failed":
        builder.fail(1, "KeyError").end([0, 2], "peer_lost")
    elif end != "busy":
        builder.leave(1, abort_reason="because" if end == "aborted" else "").end([0, 2], end)
    job = INJECTIONS[injection](builder.build())
    text = as_text(job)
    assert all(line.isprintable() for line in text.split("\n"))
    assert "\nRank 0 is fine" not in text
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(explain(job))
    assert "\x1b" not in out.getvalue(), "no markup either"
    assert "\x1b" not in json.dumps(as_json(job))


def test_json_has_the_documented_keys() -> None:
    builder = busy().report([0], 17)
    found = as_json(builder.build())
    assert list(found) == ["version", "job", "diagnosis", "ranks", "advice", "problems", "workers"]
    assert found["job"]["running"] is True
    diagnosis = found["diagnosis"]
    assert (diagnosis["kind"], diagnosis["ranks"]) == ("busy", [1])
    assert diagnosis["text"] == first_lines(builder)
    assert diagnosis["waiting"][0]["ranks"] == [0, 2]
    operation = diagnosis["waiting"][0]["operation"]
    assert operation["site"] == "/srv/job/train.py:40"
    assert operation["end"] is None
    assert abs(found["ranks"][1]["since"] - (builder.unix - 34)) < 0.1
    assert [rank["waits_for"] for rank in found["ranks"]] == [[1], [], [1]]
    assert found["ranks"][0]["step"] == 17


def test_notes_of_ranks_are_shown() -> None:
    job = busy().build()
    assert " note" not in as_text(job)
    with_note = replace(job.ranks[1], note="evaluating\x1b")
    job = replace(job, ranks=(job.ranks[0], with_note, job.ranks[2]))
    row = next(line for line in as_text(job).splitlines() if "own code  " in line)
    assert row.endswith('"evaluating\\x1b"')
    assert as_json(job)["ranks"][1]["note"] == "evaluating\x1b"
    dead = (
        JobBuilder(3)
        .run_collectives()
        .begin([0, 2], waiting_for=1)
        .advance(1)
        .end_process(1, -9)
        .advance(0.1)
    )
    dead.end([0, 2], "peer_lost")
    job = dead.build()
    job = replace(job, ranks=(job.ranks[0], replace(job.ranks[1], note="saving"), job.ranks[2]))
    assert 'train.py:40, "saving".' in as_text(job)


def test_notes_of_many_ranks_share_a_row() -> None:
    builder = (
        JobBuilder(16)
        .run_collectives()
        .begin([n for n in range(16) if n != 3], waiting_for=3)
        .advance(5)
    )
    job = builder.build()
    same = replace(job, ranks=tuple(replace(rank, note="evaluating") for rank in job.ranks))
    assert as_text(same).count('"evaluating"') == 2
    differing = tuple(replace(rank, note=f"shard {rank.rank}") for rank in job.ranks)
    text = as_text(replace(job, ranks=differing))
    assert "several" in text
    assert '"shard 3"' in text


def test_problems_are_shown() -> None:
    builder = busy()
    builder.ranks[2].problem = "damaged: 7 bytes"
    text = as_text(replace(builder.build(), problems=("launcher.jsonl: line 3 is cut off",)))
    assert "Note: launcher.jsonl: line 3 is cut off" in text
    assert "Note: rank 2: damaged: 7 bytes" in text
    assert "flight recorder unreadable" in text


def test_a_healthy_job_has_no_suggested_fixes() -> None:
    text = as_text(JobBuilder(2).run_collectives().build())
    assert "Nothing is wrong" in text
    assert "Suggested fixes" not in text


def test_a_job_whose_ranks_have_not_joined_yet() -> None:
    (line,) = first_lines(JobBuilder(3, joined=()))
    assert line == "No rank has joined a group yet; 3 processes have been started."


def test_ranks_that_end_before_they_join() -> None:
    builder = (
        JobBuilder(3, joined=())
        .advance(1)
        .end_process(2, 1)
        .advance(0.1)
        .end_process(0, 1)
        .stop_job()
    )
    (line,) = first_lines(builder)
    assert line.startswith("Rank 2 (pid 802) ended with exit code 1")
    assert line.endswith(", before it joined any group.")


def test_the_page_documents_all_json_keys(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "json.md").read_text()
    text = page.partition("## phalanx explain --json")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", text.partition("`kind` is one of")[2].partition(".")[0])) == {
        *KINDS
    }
    builder = busy().report([0], 17)
    found = as_json(builder.build())
    operation = found["diagnosis"]["waiting"][0]["operation"]
    parts = [found["job"], found["diagnosis"], found["ranks"][0], operation]
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
def test_collapsed_numbers(numbers: list[int], text: str) -> None:
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
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(int(seconds * SECOND)) == text


def test_lists_of_ranks() -> None:
    assert [join_texts(["a", "b", "c"][:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([2, 0]) == "ranks 0 and 2"
    assert format_ranks([0, 1, 2, 7]) == "ranks 0-2, 7"


@pytest.mark.parametrize("time", (10**30, -(10**30)))
def test_times_outside_of_the_calendars_range(time: int) -> None:
    assert format_time(time) == "?"


def test_a_job_with_an_unknown_start(jobs: Path) -> None:
    """A launcher may fail after it creates the directory and before it writes job.json."""
    name = "20261122-2159-8nezfx"
    jobs.mkdir(mode=0o700)
    (jobs / name).mkdir(mode=0o700)
    job = job_reader.read_job(name)
    assert "1970" not in as_text(job)
    assert as_json(job)["job"]["started"] is None
