"""Two jobs at once: `explain` and `watch` say which one they took, and that another runs."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.observe import job_reader
from phalanx.observe.explain import as_json, as_text
from phalanx.observe.explain.formatting import describe_other_jobs
from phalanx.observe.job_directory import JobDirectory, describe_job, make_job_name
from phalanx.observe.watch import as_json as as_json_of_watch
from phalanx.observe.watch import build_view, render
from tests.made_jobs import Made


@pytest.fixture
def other(jobs: Path) -> JobDirectory:
    """An older job, that runs as long as this directory is open."""
    held = JobDirectory(str(jobs), make_job_name(), create=True)
    held.write_description(describe_job(held.name, 4))
    held.lock_shared()
    os.utime(held.path, (1, 1))  # the newest job is the one whose directory changed last
    return held


def test_the_newest_is_taken_and_the_other_is_named(job: Made, other: JobDirectory) -> None:
    with other:
        found = job_reader.read_job()
        console = Console(file=io.StringIO(), width=200)
        console.print(render(found, build_view(found, 5), console))
        watched = console.file.getvalue()  # type: ignore[attr-defined]
        named = job_reader.read_job(job.name)
    assert (found.name, found.others) == (job.name, (other.name,))
    words = f"This is the newest job; another job runs: {other.name}. `phalanx {{}} NAME` looks at"
    assert words.format("explain") in as_text(found)
    assert words.format("watch") in watched
    assert as_json(found)["job"]["others"] == [other.name]
    assert as_json_of_watch(found, build_view(found, 5))["others"] == [other.name]
    assert named.others == ()


def test_a_job_that_has_ended_is_not_named(job: Made, other: JobDirectory) -> None:
    other.close()
    found = job_reader.read_job()
    assert (found.name, found.others) == (job.name, ())
    assert "newest" not in as_text(found)


def test_of_many_jobs_three_are_named(job: Made) -> None:
    found = dataclasses.replace(job.read(), others=tuple("abcde"))
    assert describe_other_jobs(found, "explain") == (
        "This is the newest job; 5 other jobs run: a, b, c and 2 more. "
        "`phalanx explain NAME` looks at one of them."
    )
