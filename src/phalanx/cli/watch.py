"""`phalanx watch`: the current activity of all ranks of a job, and the rank that delays others."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from phalanx.cli.output import AsJson, Output, open_output
from phalanx.system.console import make_console
from phalanx.system.processes import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.diagnosis.model import Job

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Show live what every rank of a job does, which rank it waits for, and which rank "
            "delays the others.",
            "JOB is a name listed by `phalanx jobs`, or a unique prefix of it; default: the newest "
            "job. The job is not affected: the command only reads its files, and Ctrl-C stops only "
            "the command. The command ends when the job ends, with exit code 1 if the job failed.",
            "waiting: the share of the last 5 seconds in which a rank waited for others, and the "
            "rank that it waited for most. activity: the operation under way, with the line of "
            "your script, or the time that the rank has spent in your own code. step and loss: "
            "the values given to phalanx.report(step=..., loss=...).",
            "[bold]phalanx watch[/]\n  the newest job\n"
            "[bold]phalanx watch --once[/]\n  print the table once, with all ranks\n"
            "[bold]phalanx watch --json | jq .straggler[/]\n"
            "  for programs: an object for each refresh, on a line of its own, in FILE as well",
        )
    )
}

_GRACE_SECONDS = 5.0
"""Seconds in which a launcher may record the end of a job after its processes have ended."""


def command(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="Name of the job, or a unique prefix; default: the newest job."
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Refresh interval.", min=0.1, max=3600)
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Print the table once. Default when stdout is not a terminal that can redraw.",
        ),
    ] = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Watch a job until it ends."""
    console = make_console()
    once = once or not (console.is_terminal or as_json)
    file = None if output is None else open_output(output)
    readings = _Readings(job, interval, once, file)
    try:
        if as_json:
            _print_json(readings)
        elif once:
            _print(readings, console)
        else:
            _show_live(readings, console)
    except KeyboardInterrupt:
        if not as_json:
            console.print("Stopped watching; the job continues.")
        raise typer.Exit(ExitCode.SUCCESS) from None
    except BrokenPipeError:  # the reader of the output is gone
        raise typer.Exit(ExitCode.SUCCESS) from None
    finally:
        if file is not None:
            file.close()
    succeeded, text = readings.outcome
    if text and not as_json:
        console.print(text, soft_wrap=True, markup=False)
    raise typer.Exit(ExitCode.SUCCESS if succeeded else ExitCode.FAILURE)


class _Readings:
    """Readings of a job: one per interval until it has ended, or a single one.

    Each is written to `file` as a line of JSON, unless that is None.
    """

    def __init__(
        self, name: str | None, interval: float, once: bool, file: TextIO | None = None
    ) -> None:
        from phalanx.diagnosis.watch import WINDOW

        self._name = name
        self._interval = interval
        self._once = once
        self._file = file
        self._last: Job | None = None
        self._removed = False
        self.window = max(interval, WINDOW)

    @property
    def outcome(self) -> tuple[bool, str]:
        """True unless the job has failed, and a sentence about its end, empty while it runs."""
        from phalanx.diagnosis.watch import get_outcome, has_failed
        from phalanx.system.escape import escape

        if self._last is None:
            return True, ""
        name = escape(self._last.name)
        if self._removed and not has_failed(self._last):
            return True, f"Job {name} completed, and its records have been removed."
        if self._removed:
            return (
                False,
                f"Job {name} had failed when it was last read, and its records have been removed.",
            )
        found = get_outcome(self._last)
        if found is None:
            return True, ""
        succeeded, text = found
        hint = "" if succeeded else f" See: phalanx explain {name}"
        return succeeded, f"Job {name} {text}.{hint}"

    def __iter__(self) -> Iterator["Job"]:
        from phalanx.diagnosis.job_reader import read_job
        from phalanx.diagnosis.watch import get_history_length
        from phalanx.usage_errors import UsageError

        ended_since: float | None = None
        while True:
            began = time.monotonic()
            try:
                job = read_job(
                    self._name, get_history_length(len(self._last.ranks) if self._last else 1)
                )
            except UsageError:
                if self._last is None or os.path.lexists(self._last.path):
                    raise
                self._removed = True  # as after a clean end
                return
            if self._last is not None:  # this reading was selected by name
                job = replace(job, other_jobs=self._last.other_jobs)
            self._last, self._name = job, job.name
            if self._file is not None:
                print(_as_line(job, self.window), file=self._file, flush=True)
            yield job
            ended_since = (ended_since or began) if self._has_ended(job) else None
            grace = self._get_grace_seconds(job)
            if self._once or (ended_since is not None and began >= ended_since + grace):
                return
            time.sleep(max(self._interval - (time.monotonic() - began), 0))

    def _has_ended(self, job: "Job") -> bool:
        from phalanx.diagnosis.watch import get_outcome

        return get_outcome(job) is not None

    def _get_grace_seconds(self, job: "Job") -> float:
        launched = any(rank.start is not None for rank in job.ranks)
        return _GRACE_SECONDS if launched and job.code is None else 0.0


def _print_json(readings: _Readings) -> None:
    for job in readings:
        print(_as_line(job, readings.window), flush=True)


def _as_line(job: "Job", window: float) -> str:
    from phalanx.diagnosis.watch import as_json, build_view

    return json.dumps(as_json(job, build_view(job, window)), allow_nan=False)


def _print(readings: _Readings, console: "Console") -> None:
    from phalanx.diagnosis.watch import build_view
    from phalanx.diagnosis.watch_table import render

    for job in readings:
        console.print(render(job, build_view(job, readings.window), console))


def _show_live(readings: _Readings, console: "Console") -> None:
    """Draw on the terminal's alternate screen, and print the last table on the normal screen."""
    from rich.live import Live

    from phalanx.diagnosis.watch import build_view
    from phalanx.diagnosis.watch_table import render

    job: Job | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for job in readings:
            live.update(
                render(job, build_view(job, readings.window), console, console.height), refresh=True
            )
    if job is not None:
        console.print(render(job, build_view(job, readings.window), console))
