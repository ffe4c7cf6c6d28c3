"""With several running jobs, `explain` and `watch` name the selected job and the others."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.diagnosis import job_reader
from phalanx.diagnosis.explain import as_json, as_text
from phalanx.diagnosis.formatting import describe_other_jobs
from phalanx.diagnosis.watch import as_json as watch_as_json
from phalanx.diagnosis.watch import build_view
from phalanx.diagnosis.watch_table import render
from phalanx.recorder.job_directory import JobDirectory, make_job_name
from tests.job_directories import JobFixture, write_recorder


@pytest.fixture
def other(jobs: Path) -> JobDirectory:
    """Return an older job, which is running as long as this directory is open."""
    held = JobDirectory(str(jobs), make_job_name(), create=True)
    held.write_description(4)
    held.lock_shared()
    os.utime(held.path, (1, 1))  # the newest job is the one whose directory changed last
    return held


def test_the_newest_job_is_selected_and_the_other_is_named(
    job: JobFixture, other: JobDirectory
) -> None:
    with other:
        found = job_reader.read_job()
        console = Console(file=io.StringIO(), width=200)
        console.print(render(found, build_view(found, 5), console))
        watched = console.file.getvalue()  # type: ignore[attr-defined]
        named = job_reader.read_job(job.name)
    assert (found.name, found.other_jobs) == (job.name, (other.name,))
    text = (
        f"This is the newest job; another job is running: {other.name}. "
        "To select it, use `phalanx {} NAME`."
    )
    assert text.format("explain") in as_text(found)
    assert text.format("watch") in watched
    assert as_json(found)["job"]["other_jobs"] == [other.name]
    assert watch_as_json(found, build_view(found, 5))["other_jobs"] == [other.name]
    assert named.other_jobs == ()


def test_an_ended_job_is_not_named(job: JobFixture, other: JobDirectory) -> None:
    other.close()
    found = job_reader.read_job()
    assert (found.name, found.other_jobs) == (job.name, ())
    assert "newest" not in as_text(found)


def test_a_job_that_its_process_has_left_is_not_named(job: JobFixture, other: JobDirectory) -> None:
    with other:
        other.write_description(1)
        os.utime(other.path, (1, 1))
        assert job_reader.read_job().other_jobs == (other.name,)
        write_recorder(Path(other.path), 0, ending="exited", size=1)
        os.utime(other.path, (1, 1))
        found = job_reader.read_job()
    assert (found.name, found.other_jobs) == (job.name, ())


def test_at_most_three_jobs_are_named(job: JobFixture) -> None:
    found = dataclasses.replace(job.read(), other_jobs=tuple("abcde"))
    assert describe_other_jobs(found, "explain") == (
        "This is the newest job; 5 other jobs are running: a, b, c and 2 more. "
        "To select one of them, use `phalanx explain NAME`."
    )
