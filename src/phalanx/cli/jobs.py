"""`phalanx jobs`: the jobs that run, and those that have failed."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from phalanx.observe.job_reader import JobSummary

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "List the jobs that run on this machine, and those that have failed, newest first.",
            "Every job has a directory while it runs. After a clean end it is removed. After a "
            "failure it is kept, with what every rank was doing, and removed when newer ones have "
            "taken its place: 20 jobs and 256 MiB are kept (PHALANX_JOBS_KEPT, "
            "PHALANX_JOBS_KEPT_MIB). Only you can read your jobs.",
            "[bold]phalanx jobs[/]\n  list them\n"
            "[bold]phalanx explain 20261121-0901-k3f9x2[/]\n"
            "  what happened in one; the beginning of the name is enough if no other job has it\n"
            "[bold]phalanx jobs --remove 20261121-0901-k3f9x2[/]\n"
            "  remove one that has ended\n"
            "[bold]phalanx jobs --remove-ended[/]\n  remove all that have ended",
        )
    )
}

_COLORS = {"running": "green", "failed": "red", "finished": "default"}


def command(
    as_json: Annotated[
        bool, typer.Option("--json", help="As JSON: a list of objects, times in Unix seconds.")
    ] = False,
    remove: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Remove this job, if it has ended. May be repeated."),
    ] = None,
    remove_ended: Annotated[
        bool, typer.Option("--remove-ended", help="Remove all jobs that have ended.")
    ] = False,
) -> None:
    """List or remove jobs."""
    if remove or remove_ended:
        _remove(remove or [], ended=remove_ended)
        return
    jobs, refused = _summaries()
    if as_json:
        print(json.dumps([dataclasses.asdict(job) for job in jobs], indent=2))
    elif jobs:
        _print(jobs)
    else:
        from phalanx.observe.job_lookup import get_base_directory

        print(f"no jobs in {get_base_directory()}: none runs, and none that failed was kept")
    for line in refused:
        sys.stderr.write(f"phalanx jobs: {line}\n")


def _summaries() -> tuple[list[JobSummary], list[str]]:
    """All jobs, newest first, and why some can't be read."""
    from phalanx.observe.escape import escape
    from phalanx.observe.job_directory import JobDirectory
    from phalanx.observe.job_lookup import get_base_directory, list_jobs
    from phalanx.observe.job_reader import read_summary

    jobs, refused = [], []
    for name in list_jobs():
        try:
            with JobDirectory(get_base_directory(), name) as job:
                found = read_summary(job)
        except FileNotFoundError:  # it has just ended
            continue
        except OSError as error:
            refused.append(escape(str(error), 400))
            continue
        jobs.append(found)
        refused += [f"{name}: {escape(problem)}" for problem in found.problems]
    return jobs, refused


def _remove(names: list[str], *, ended: bool) -> None:
    from phalanx.observe.job_lookup import remove_job

    if ended:
        jobs, _ = _summaries()
        names = [*names, *(job.name for job in jobs if job.state != "running")]
    if not names:
        print("no job has ended: nothing to remove")
    failed = False
    for name in dict.fromkeys(names):
        try:
            print(f"removed {remove_job(name)}")
        except ValueError as error:  # a UsageError, as where somebody else has just removed it
            failed = True
            sys.stderr.write(f"phalanx: error: {error}\n")
    if failed:
        raise typer.Exit(2)


def _print(jobs: list[JobSummary]) -> None:
    from rich.console import Console

    Console(highlight=False).print(_table(jobs))


def _table(jobs: list[JobSummary]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from phalanx.observe.escape import escape

    # The command line gets the width that is left; a name must be whole, to be copied.
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    for heading in ("job", "state", "started"):
        table.add_column(heading, no_wrap=True)
    table.add_column("ranks", justify="right")
    table.add_column("command", no_wrap=True, overflow="ellipsis", ratio=1)
    for job in jobs:
        table.add_row(
            job.name,
            Text(job.state, style=_COLORS[job.state]),
            _time(job.started),
            str(job.world_size or "-"),
            Text(escape(shlex.join(job.command)) or "-"),
        )
    return table


def _time(seconds: float) -> str:
    if not seconds:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a year that no calendar has
        return "-"
