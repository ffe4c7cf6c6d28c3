"""`phalanx jobs`: the running jobs, and the jobs that have failed."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.output import AsJson, Output, check_writable, write_json
from phalanx.system.console import make_console
from phalanx.system.processes import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from phalanx.diagnosis.job_reader import JobSummary

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "List the jobs that are running on this machine and the jobs that have failed, newest "
            "first.",
            "Every job has a directory while it runs. The directory is removed after a clean end "
            "and kept after a failure, with a record of the activity of every rank. The newest 20 "
            "jobs and at most 256 MiB are kept (PHALANX_JOBS_KEPT, PHALANX_JOBS_KEPT_MIB). Only "
            "you can read your jobs.",
            "[bold]phalanx jobs[/]\n  list them\n"
            "[bold]phalanx explain 20261121-0901-k3f9x2[/]\n"
            "  explain a job; a unique prefix of its name is enough\n"
            "[bold]phalanx jobs --remove 20261121-0901-k3f9x2[/]\n"
            "  remove a job that has ended\n"
            "[bold]phalanx jobs --remove-ended[/]\n  remove all jobs that have ended\n"
            "[bold]phalanx jobs --json | jq '.\\[].name'[/]\n"
            "  for programs: a list of objects, with times in Unix seconds",
        )
    )
}

_COLORS = {"running": "green", "failed": "red", "finished": "default"}


def command(
    as_json: AsJson = False,
    output: Output = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB", help="Remove this job if it has ended. May be repeated."),
    ] = None,
    remove_ended: Annotated[
        bool, typer.Option("--remove-ended", help="Remove all jobs that have ended.")
    ] = False,
) -> None:
    """List or remove jobs."""
    if remove or remove_ended:
        if as_json or output is not None:
            from phalanx.usage_errors import UsageError

            raise UsageError("--json and --output are for the list of jobs: omit them or --remove")
        _remove(remove or [], ended=remove_ended)
        return
    check_writable(output)
    jobs, errors = _read_summaries()
    write_json([dataclasses.asdict(job) for job in jobs], as_json, output)
    if as_json:
        pass
    elif jobs:
        _print_table(jobs)
    else:
        from phalanx.recorder.job_directory import get_base_directory

        print(f"no jobs in {get_base_directory()}: none is running, and no failed job is kept")
    for line in errors:
        sys.stderr.write(f"phalanx jobs: {line}\n")


def _read_summaries() -> tuple[list[JobSummary], list[str]]:
    """Return all jobs, newest first, and the errors of jobs that cannot be read."""
    from phalanx.diagnosis.job_reader import read_summary
    from phalanx.recorder.job_directory import JobDirectory, get_base_directory, list_jobs
    from phalanx.system.escape import escape

    jobs, errors = [], []
    for name in list_jobs():
        try:
            with JobDirectory(get_base_directory(), name) as job:
                found = read_summary(job)
        except FileNotFoundError:  # it has just ended
            continue
        except OSError as error:
            errors.append(escape(str(error), 400))
            continue
        jobs.append(found)
        errors += [f"{name}: {escape(problem)}" for problem in found.problems]
    return jobs, errors


def _remove(names: list[str], *, ended: bool) -> None:
    from phalanx.recorder.job_directory import remove_job

    if ended:
        jobs, _ = _read_summaries()
        names = [*names, *(job.name for job in jobs if job.state != "running")]
    if not names:
        print("nothing to remove: no job has ended")
    failed = False
    for name in dict.fromkeys(names):
        try:
            print(f"removed {remove_job(name)}")
        except ValueError as error:  # a UsageError, such as if the job has just been removed
            failed = True
            sys.stderr.write(f"phalanx: error: {error}\n")
    if failed:
        raise typer.Exit(ExitCode.USAGE)


def _print_table(jobs: list[JobSummary]) -> None:
    make_console().print(_build_table(jobs))


def _build_table(jobs: list[JobSummary]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from phalanx.system.escape import escape

    # Names are never truncated, so that they can be copied.
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    for heading in ("job", "state", "started"):
        table.add_column(heading, no_wrap=True)
    table.add_column("ranks", justify="right")
    table.add_column("command", no_wrap=True, overflow="ellipsis", ratio=1)
    for job in jobs:
        table.add_row(
            job.name,
            Text(job.state, style=_COLORS[job.state]),
            _format_time(job.started),
            f"{job.world_size or '-'}{f' ({job.replaced} replaced)' if job.replaced else ''}",
            Text(escape(shlex.join(job.command)) or "-"),
        )
    return table


def _format_time(seconds: float) -> str:
    if not seconds:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # outside the calendar's range
        return "-"
