"""`phalanx watch`: what every rank of a job does just now, and who holds up whom."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.observe.model import Job

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Show live what every rank of a job does, whom it waits for, and who holds up others.",
            "JOB is a name out of `phalanx jobs`, or its beginning; without it, the newest. The "
            "job isn't disturbed: only its files are read, and Ctrl-C ends the watching alone. "
            "When the job ends, so does this, with exit code 1 if it failed.",
            "waiting: the share of the last 5 seconds in which a rank waited for others, and for "
            "whom most. in: the operation under way, with the line of your script; or for how long "
            "the rank has been in your own code. step and loss are what the script tells by "
            "phalanx.report(step=..., loss=...).",
            "[bold]phalanx watch[/]\n  the newest job\n"
            "[bold]phalanx watch --once[/]\n  one look, all ranks\n"
            "[bold]phalanx watch --json | jq .straggler[/]\n  for programs",
        )
    )
}

_PLAIN_WIDTH = 200
_GRACE = 5.0
"""Seconds for a launcher to say how a job ended whose processes are all gone."""


def command(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Its name, or the beginning of it.")
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between two looks.", min=0.1, max=3600)
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Look once and print it. So it is where stdout is no terminal."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object, in a line, for each look.")
    ] = False,
) -> None:
    """Watch a job until it ends."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
        once = once or not as_json
    looks = _Looks(job, interval, once)
    try:
        if as_json:
            _print_json(looks)
        elif once:
            _print(looks, console)
        else:
            _show_live(looks, console)
    except KeyboardInterrupt:
        if not as_json:
            console.print("The watching has ended; the job goes on.")
        raise typer.Exit(0) from None
    except BrokenPipeError:  # whoever read this has seen enough
        raise typer.Exit(0) from None
    well, words = looks.ending
    if words and not as_json:
        console.print(words, soft_wrap=True, markup=False)
    raise typer.Exit(0 if well else 1)


class _Looks:
    """Readings of a job, one per interval until it has ended, or one alone."""

    def __init__(self, name: str | None, interval: float, once: bool) -> None:
        from phalanx.observe.watch import WINDOW

        self._name = name
        self._interval = interval
        self._once = once
        self._last: Job | None = None
        self._removed = False
        self.window = max(interval, WINDOW)

    @property
    def ending(self) -> tuple[bool, str]:
        """Whether the job ended well (or goes on), and a sentence; empty while it goes on."""
        from phalanx.observe.escape import escape
        from phalanx.observe.watch import get_outcome, has_failed

        if self._last is None:
            return True, ""
        name = escape(self._last.name)
        if self._removed and not has_failed(self._last):
            return True, f"Job {name} ended well, and its records are removed."
        if self._removed:
            return (
                False,
                f"Job {name} had failed when it was last looked at, and its records are gone.",
            )
        end = get_outcome(self._last)
        if end is None:
            return True, ""
        well, words = end
        why = "" if well else f" See: phalanx explain {name}"
        return well, f"Job {name} {words}.{why}"

    def __iter__(self) -> Iterator["Job"]:
        from phalanx.errors import UsageError
        from phalanx.observe.job_reader import read_job
        from phalanx.observe.watch import get_history_length

        over_since: float | None = None
        while True:
            began = time.monotonic()
            try:
                job = read_job(
                    self._name, get_history_length(len(self._last.ranks) if self._last else 1)
                )
            except UsageError:
                if self._last is None or os.path.lexists(self._last.path):
                    raise
                self._removed = True  # as is done after a good end
                return
            if self._last is not None:  # it was given the name of the first
                job = replace(job, others=self._last.others)
            self._last, self._name = job, job.name
            yield job
            over_since = (over_since or began) if self._is_over(job) else None
            if self._once or (over_since is not None and began >= over_since + self._grace(job)):
                return
            time.sleep(max(self._interval - (time.monotonic() - began), 0))

    def _is_over(self, job: "Job") -> bool:
        from phalanx.observe.watch import get_outcome

        return get_outcome(job) is not None

    def _grace(self, job: "Job") -> float:
        launched = any(rank.start is not None for rank in job.ranks)
        return _GRACE if launched and job.code is None else 0.0


def _print_json(looks: _Looks) -> None:
    from phalanx.observe.watch import as_json, build_view

    for job in looks:
        print(json.dumps(as_json(job, build_view(job, looks.window)), allow_nan=False), flush=True)


def _print(looks: _Looks, console: "Console") -> None:
    from phalanx.observe.watch import build_view, render

    for job in looks:
        console.print(render(job, build_view(job, looks.window), console))


def _show_live(looks: _Looks, console: "Console") -> None:
    """Draw on the terminal's other screen, and leave the last table on the usual one."""
    from rich.live import Live

    from phalanx.observe.watch import build_view, render

    job: Job | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for job in looks:
            live.update(
                render(job, build_view(job, looks.window), console, console.height), refresh=True
            )
    if job is not None:
        console.print(render(job, build_view(job, looks.window), console))
