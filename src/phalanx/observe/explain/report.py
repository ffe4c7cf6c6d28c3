"""The complete explanation of a job for a terminal, as plain text or as JSON."""

from __future__ import annotations

import contextlib
import io
import math
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from phalanx.observe.diagnosis import Diagnosis, WaitForGraph, diagnose_graph
from phalanx.observe.diagnosis.exit_reasons import get_clock_offset
from phalanx.observe.escape import escape
from phalanx.observe.explain.advice import suggest_fixes
from phalanx.observe.explain.formatting import describe_other_jobs, format_operation
from phalanx.observe.explain.pending_calls import calls_as_json, format_call_lines
from phalanx.observe.explain.sentences import write_sentences
from phalanx.observe.explain.table import build_rows, build_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from phalanx.observe.diagnosis import Side
    from phalanx.observe.explain.table import Row
    from phalanx.observe.model import Job, Operation

__all__ = ["as_json", "as_text", "explain"]

VERSION = 1
"""Format version of `as_json`; incremented if a key changes or is removed, not if one is added."""
_WIDE = 1000
_NO_FAILURE = ("running", "ended")


def explain(job: Job) -> RenderableType:
    """Explain the state of a job for a rich console: sentences, a table of the ranks, advice."""
    graph = WaitForGraph(job)
    diagnosis = diagnose_graph(graph)
    fine = diagnosis.kind in _NO_FAILURE
    first, *rest = write_sentences(graph, diagnosis)
    style = "bold green" if fine else "bold red"
    parts: list[RenderableType] = [Text(_format_headline(job)), Text(first, style)]
    if others := describe_other_jobs(job, "explain"):
        parts.insert(1, Text(f"{others}\n", "yellow"))
    parts += [Text(sentence) for sentence in rest]
    if graph.ranks:
        parts += [Text(_format_caption(graph)), build_table(graph, diagnosis)]
    if lines := format_call_lines(graph):
        parts += [Text("\nPending remote calls:"), *map(Text, lines)]
    steps = suggest_fixes(graph, diagnosis)
    if steps:
        parts += [Text("\nSuggested fixes:"), _build_list(steps)]
    parts += [Text(f"Note: {escape(problem)}", "yellow") for problem in _list_problems(job)]
    return Group(*parts)


def as_text(job: Job, encoding: str = "utf-8") -> str:
    """Return the explanation as plain text without colors; long lines are not wrapped at a width.

    If `encoding` does not have box-drawing characters, the table is drawn with other characters.
    """
    out = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace", write_through=True)
    Console(file=out, width=_WIDE, color_system=None, highlight=False).print(explain(job))
    out.seek(0)
    text = out.read()
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def as_json(job: Job) -> dict[str, Any]:
    """Return the explanation for programs; docs/when-a-job-hangs-or-dies.md documents the keys.

    Times are Unix seconds, or null. Texts from the job are not escaped.
    """
    graph = WaitForGraph(job)
    diagnosis = diagnose_graph(graph)
    return {
        "version": VERSION,
        "job": {
            "name": job.name,
            "path": job.path,
            "command": list(job.command),
            "started": job.started if job.started and math.isfinite(job.started) else None,
            "world_size": job.world_size,
            "attempt": job.attempt,
            "running": job.running,
            "code": job.code,
            "other_jobs": list(job.other_jobs),
        },
        "diagnosis": _diagnosis_as_json(graph, diagnosis),
        "ranks": [_rank_as_json(graph, row) for row in build_rows(graph, diagnosis, fold=False)],
        "advice": suggest_fixes(graph, diagnosis),
        "problems": list(_list_problems(job)),
        "workers": calls_as_json(job),
    }


def _format_headline(job: Job) -> str:
    """Return the job in one line: its name, ranks, state and command."""
    command = escape(" ".join(job.command), 80)
    state = "running" if job.running else "ended"
    if job.code is not None:
        state = f"ended with code {job.code}"
    began = ""
    if job.started:
        # A time outside the calendar's range is omitted.
        with contextlib.suppress(ValueError, OverflowError, OSError):
            began = f", started {datetime.fromtimestamp(job.started):%Y-%m-%d %H:%M:%S}"
    ranks = f"{len(job.ranks)} rank{'s' if len(job.ranks) != 1 else ''}"
    attempt = f", attempt {job.attempt + 1}" if job.attempt else ""
    return f"Job {escape(job.name, 80)} ({ranks}{attempt}{began}, {state}): {command}\n"


def _build_list(steps: Iterable[str]) -> Table:
    items = Table.grid(padding=(0, 1))
    items.add_column(no_wrap=True)
    items.add_column()
    for step in steps:
        items.add_row("  -", Text(step))
    return items


def _format_caption(graph: WaitForGraph) -> str:
    if graph.first_failure is None:
        return ""
    return "\nRanks at the time of the failure:"


def _list_problems(job: Job) -> Iterable[str]:
    yield from job.problems
    for rank in job.ranks:
        if rank.problem:
            yield f"rank {rank.rank}: {rank.problem}"


def _to_unix(graph: WaitForGraph, time: int) -> float | None:
    clock = get_clock_offset(graph.job)
    return (time + clock) / 1e9 if time and clock else None


def _diagnosis_as_json(graph: WaitForGraph, diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "kind": diagnosis.kind,
        "ranks": list(diagnosis.ranks),
        "since": _to_unix(graph, diagnosis.since),
        "text": write_sentences(graph, diagnosis),
        "reason": diagnosis.reason,
        "sides": [_side_as_json(graph, side) for side in diagnosis.sides],
        "waiting": [_side_as_json(graph, side) for side in diagnosis.waiting],
    }


def _side_as_json(graph: WaitForGraph, side: Side) -> dict[str, Any]:
    number = side.ranks[0]
    return {
        "ranks": list(side.ranks),
        "operation": _operation_as_json(graph, number, side.operation),
    }


def _rank_as_json(graph: WaitForGraph, row: Row) -> dict[str, Any]:
    number = row.ranks[0]
    rank, status, wait = graph.ranks[number], graph.exits[number], graph.waits.get(number)
    return {
        "rank": number,
        "pid": rank.pid or None,
        "state": row.state,
        "exit_reason": status.reason,
        "code": status.code,
        "since": _to_unix(graph, row.since),
        "operation": _operation_as_json(graph, number, graph.current_operation(number)),
        "last_operation": _operation_as_json(graph, number, graph.previous_operation(number)),
        "waits_for": list(wait.peers) if wait is not None else [],
        "step": row.steps[0] if row.steps else None,
        "note": rank.note,
        "exception": rank.exception,
        "problem": rank.problem,
    }


def _operation_as_json(
    graph: WaitForGraph, number: int, operation: Operation | None
) -> dict[str, Any] | None:
    if operation is None:
        return None
    return {
        "text": format_operation(graph, number, operation),
        "kind": operation.kind,
        "sequence": operation.sequence,
        "dtype": operation.dtype,
        "count": operation.count,
        "op": operation.op,
        "peer": operation.peer,
        "site": operation.site,
        "begin": _to_unix(graph, operation.begin),
        "end": _to_unix(graph, operation.end),
        "outcome": operation.outcome,
    }
