"""An explanation put together: for a terminal, as plain text, as JSON."""

from __future__ import annotations

import io
import math
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from phalanx.observe.culprit import Scene, Verdict, find_in
from phalanx.observe.culprit.endings import clock_of
from phalanx.observe.escape import escape
from phalanx.observe.explain.advice import advice
from phalanx.observe.explain.sentences import sentences
from phalanx.observe.explain.table import rows, table
from phalanx.observe.explain.words import operation_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from phalanx.observe.culprit import Side
    from phalanx.observe.explain.table import Row
    from phalanx.observe.model import Job, Operation

__all__ = ["as_json", "as_text", "explain"]

VERSION = 1
"""Of what `as_json` returns: raised when a key changes its meaning or goes, not when one comes."""
_WIDE = 1000
_FINE = ("running", "ended")


def explain(job: Job) -> RenderableType:
    """What is wrong with a job, for a console of rich: sentences, a table of the ranks, advice."""
    scene = Scene(job)
    verdict = find_in(scene)
    first, *rest = sentences(scene, verdict)
    style = "bold green" if verdict.kind in _FINE else "bold red"
    parts: list[RenderableType] = [Text(_headline(job)), Text(first, style)]
    parts += [Text(sentence) for sentence in rest]
    if scene.ranks:
        parts += [Text(_caption(scene)), table(scene, verdict)]
    steps = advice(scene, verdict)
    if steps:
        parts += [Text("\nWhat to try:"), _list(steps)]
    parts += [Text(f"Note: {escape(problem)}", "yellow") for problem in _problems(job)]
    return Group(*parts)


def as_text(job: Job, encoding: str = "utf-8") -> str:
    """The same without colours, in lines that are as long as they need to be.

    Where the text goes to an `encoding` without lines to draw a table with, it gets others.
    """
    out = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace", write_through=True)
    Console(file=out, width=_WIDE, color_system=None, highlight=False).print(explain(job))
    out.seek(0)
    text = out.read()
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def as_json(job: Job) -> dict[str, Any]:
    """The same for programs: docs/when-a-job-hangs-or-dies.md lists the keys.

    Times are Unix seconds, or null. Texts of the job's are as they were written.
    """
    scene = Scene(job)
    verdict = find_in(scene)
    return {
        "version": VERSION,
        "job": {
            "name": job.name,
            "path": job.path,
            "command": list(job.command),
            "started": job.started if math.isfinite(job.started) else None,
            "world_size": job.world_size,
            "attempt": job.attempt,
            "running": job.running,
            "code": job.code,
        },
        "verdict": _verdict_json(scene, verdict),
        "ranks": [_rank_json(scene, row) for row in rows(scene, verdict, fold=False)],
        "advice": advice(scene, verdict),
        "problems": list(_problems(job)),
    }


def _headline(job: Job) -> str:
    """The job in a line: its name, command, ranks, and whether it runs."""
    command = escape(" ".join(job.command), 80)
    state = "running" if job.running else "ended"
    if job.code is not None:
        state = f"ended with code {job.code}"
    try:
        began = f", started {datetime.fromtimestamp(job.started):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # not a time that a calendar has
        began = ""
    ranks = f"{len(job.ranks)} rank{'s' if len(job.ranks) != 1 else ''}"
    attempt = f", attempt {job.attempt + 1}" if job.attempt else ""
    return f"Job {escape(job.name, 80)} ({ranks}{attempt}{began}, {state}): {command}\n"


def _list(steps: Iterable[str]) -> Table:
    items = Table.grid(padding=(0, 1))
    items.add_column(no_wrap=True)
    items.add_column()
    for step in steps:
        items.add_row("  -", Text(step))
    return items


def _caption(scene: Scene) -> str:
    if scene.trouble is None:
        return ""
    return "\nWhere the ranks were when it went wrong:"


def _problems(job: Job) -> Iterable[str]:
    yield from job.problems
    for rank in job.ranks:
        if rank.problem:
            yield f"rank {rank.rank}: {rank.problem}"


def _unix(scene: Scene, time: int) -> float | None:
    clock = clock_of(scene.job)
    return (time + clock) / 1e9 if time and clock else None


def _verdict_json(scene: Scene, verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": verdict.kind,
        "ranks": list(verdict.ranks),
        "since": _unix(scene, verdict.since),
        "text": sentences(scene, verdict),
        "reason": verdict.reason,
        "sides": [_side_json(scene, side) for side in verdict.sides],
        "waiting": [_side_json(scene, side) for side in verdict.waiting],
    }


def _side_json(scene: Scene, side: Side) -> dict[str, Any]:
    number = side.ranks[0]
    return {
        "ranks": list(side.ranks),
        "operation": _operation_json(scene, number, side.operation),
    }


def _rank_json(scene: Scene, row: Row) -> dict[str, Any]:
    number = row.ranks[0]
    rank, end, wait = scene.ranks[number], scene.ends[number], scene.waits.get(number)
    return {
        "rank": number,
        "pid": rank.pid or None,
        "state": row.state,
        "ending": end.how,
        "code": end.code,
        "since": _unix(scene, row.since),
        "operation": _operation_json(scene, number, scene.under_way(number)),
        "last_operation": _operation_json(scene, number, scene.before(number)),
        "waits_for": list(wait.peers) if wait is not None else [],
        "step": row.steps[0] if row.steps else None,
        "note": rank.note,
        "last_words": rank.last_words,
        "problem": rank.problem,
    }


def _operation_json(
    scene: Scene, number: int, operation: Operation | None
) -> dict[str, Any] | None:
    if operation is None:
        return None
    return {
        "text": operation_of(scene, number, operation),
        "kind": operation.kind,
        "sequence": operation.sequence,
        "dtype": operation.dtype,
        "count": operation.count,
        "op": operation.op,
        "peer": operation.peer,
        "site": operation.site,
        "begin": _unix(scene, operation.begin),
        "end": _unix(scene, operation.end),
        "outcome": operation.outcome,
    }
