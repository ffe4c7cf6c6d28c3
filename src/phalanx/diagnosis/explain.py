"""The explanation of a job: the diagnosis in sentences, a table of the ranks, and suggested fixes.

`phalanx.diagnosis.kinds` provides the sentences and the fixes. The table shows the state of each
rank at the moment of the failure, and how it ended. The result is for a terminal, plain text or
JSON.
"""

from __future__ import annotations

import contextlib
import io
import math
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from phalanx.diagnosis.exit_reasons import get_clock_offset, get_group_error
from phalanx.diagnosis.formatting import (
    collapse_numbers,
    describe_other_jobs,
    format_call_site,
    format_duration,
    format_for_column,
    format_last_note,
    format_operation,
    format_ranks,
    format_time,
)
from phalanx.diagnosis.kinds import Diagnosis, diagnose
from phalanx.diagnosis.kinds.mismatches import find_incomplete_messages
from phalanx.diagnosis.kinds.pending_calls import calls_as_json, format_call_lines
from phalanx.system.escape import escape
from phalanx.system.processes import describe_exit

if TYPE_CHECKING:
    from rich.console import RenderableType

    from phalanx.diagnosis.kinds import Side
    from phalanx.diagnosis.model import Job, Operation
    from phalanx.diagnosis.wait_for_graph import WaitForGraph

VERSION = 1
"""Format version of `as_json`; incremented if a key changes or is removed, not if one is added."""

_WIDE = 1000
_NO_FAILURE = ("running", "ended")

_MOST_REPLACED = 8
"""The number of replaced processes that are listed, the newest."""
_FOLD_FROM = 9
"""Number of ranks from which on ranks in the same state share a row."""
_MAX_ROWS = 64
_ERRORS = {
    "peer_lost": "PeerLost",
    "left": "CollectiveMismatch",
    "mismatch": "CollectiveMismatch",
    "deadlock": "CollectiveMismatch",
    "timeout": "CollectiveTimeout",
    "aborted": "Aborted",
    "interrupted": "Aborted",
}
_STATES = {
    "vanished": "disappeared",
    "interrupted": "interrupted (Ctrl-C)",
    "completed": "ended",
    "absent": "no trace",
    "other_host": "on another host",
    "left": "left its groups",
}


def explain(job: Job) -> RenderableType:
    """Explain the state of a job for a rich console: sentences, a table of the ranks, advice."""
    diagnosis = diagnose(job)
    graph = diagnosis.graph
    first, *rest = diagnosis.describe()
    parts: list[RenderableType] = [Text(_format_headline(job))]
    if others := describe_other_jobs(job, "explain"):
        parts.append(Text(f"{others}\n", "yellow"))
    parts.append(Text(first, "bold green" if diagnosis.kind in _NO_FAILURE else "bold red"))
    parts += [Text(sentence) for sentence in [*rest, *_describe_replaced(job)]]
    if graph.ranks:
        caption = "" if graph.first_failure is None else "\nRanks at the time of the failure:"
        parts += [Text(caption), _build_table(diagnosis)]
    if lines := format_call_lines(graph):
        parts += [Text("\nPending remote calls:"), *map(Text, lines)]
    if steps := diagnosis.suggest_fixes():
        items = Table.grid(padding=(0, 1))
        items.add_column(no_wrap=True)
        items.add_column()
        for step in steps:
            items.add_row("  -", Text(step))
        parts += [Text("\nSuggested fixes:"), items]
    parts += [Text(f"Note: {escape(problem)}", "yellow") for problem in job.list_problems()]
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
    """Return the explanation for programs; the keys are documented.

    Times are Unix seconds, or null. Texts from the job are not escaped.
    """
    diagnosis = diagnose(job)
    graph = diagnosis.graph
    return {
        "version": VERSION,
        "job": {
            "name": job.name,
            "path": job.path,
            "command": list(job.command),
            "started": job.started if job.started and math.isfinite(job.started) else None,
            "world_size": job.world_size,
            "attempt": job.attempt,
            "replaced": [
                {
                    "rank": each.rank,
                    "pid": each.start.pid,
                    "code": each.start.code,
                    "ended": each.start.ended,
                }
                for each in job.replaced
            ],
            "running": job.running,
            "code": job.code,
            "other_jobs": list(job.other_jobs),
        },
        "diagnosis": {
            "kind": diagnosis.kind,
            "ranks": list(diagnosis.ranks),
            "since": _to_unix(graph, diagnosis.since),
            "text": diagnosis.describe(),
            "reason": diagnosis.reason,
            "sides": [_side_as_json(graph, side) for side in diagnosis.sides],
            "waiting": [_side_as_json(graph, side) for side in diagnosis.waiting],
        },
        "ranks": [_rank_as_json(graph, row) for row in _build_rows(diagnosis)],
        "advice": diagnosis.suggest_fixes(),
        "problems": job.list_problems(),
        "workers": calls_as_json(job),
    }


def _format_headline(job: Job) -> str:
    """Return the job in one line: its name, ranks, state and command."""
    if job.source:
        return f"Dumps of {job.source} ({len(job.ranks)} ranks): {escape(job.path, 200)}\n"
    command = escape(" ".join(job.command), 80)
    state = "ended" if job.has_ended else "running"
    if job.code is not None:
        state = f"ended with code {job.code}"
    began = ""
    if job.started:
        # A time outside the calendar's range is omitted.
        with contextlib.suppress(ValueError, OverflowError, OSError):
            began = f", started {datetime.fromtimestamp(job.started):%Y-%m-%d %H:%M:%S}"
    ranks = f"{len(job.ranks)} rank{'s' if len(job.ranks) != 1 else ''}"
    attempt = f", attempt {job.attempt + 1}" if job.attempt else ""
    attempt += f", {len(job.replaced)} replaced" if job.replaced else ""
    return f"Job {escape(job.name, 80)} ({ranks}{attempt}{began}, {state}): {command}\n"


def _describe_replaced(job: Job) -> list[str]:
    """Return a sentence for each of the newest processes that were lost and replaced."""
    sentences = [
        f"Earlier, rank {rank} (pid {start.pid}) "
        f"{'was lost' if start.code is None else describe_exit(start.code)}"
        f"{'' if start.ended is None else f' at {format_time(int(start.ended * 1e9))}'}, and was "
        "replaced."
        for rank, start in ((each.rank, each.start) for each in job.replaced[-_MOST_REPLACED:])
    ]
    if more := len(job.replaced) - len(sentences):
        sentences.insert(0, f"Earlier, {more} other processes were lost and replaced.")
    return sentences


def _to_unix(graph: WaitForGraph, time: int) -> float | None:
    clock = get_clock_offset(graph.job)
    return (time + clock) / 1e9 if time and clock else None


def _side_as_json(graph: WaitForGraph, side: Side) -> dict[str, Any]:
    number = side.ranks[0]
    return {
        "ranks": list(side.ranks),
        "operation": _operation_as_json(graph, number, side.operation),
    }


def _rank_as_json(graph: WaitForGraph, row: _Row) -> dict[str, Any]:
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
    names = ("kind", "sequence", "dtype", "count", "op", "peer", "site")
    return {
        "text": format_operation(graph, number, operation),
        **{name: getattr(operation, name) for name in names},
        "begin": _to_unix(graph, operation.begin),
        "end": _to_unix(graph, operation.end),
        "outcome": operation.outcome,
    }


@dataclass(frozen=True)
class _Row:
    """A row of the table: ranks in the same state.

    Attributes:
        ranks: The numbers of the ranks.
        state: The current state of the ranks, or how they ended.
        operation: The operation that the ranks are in, or ended last.
        site: The call site of that operation.
        since: The earliest time at which the state began, in monotonic nanoseconds; 0 if unknown.
        steps: The last reported steps of the ranks.
        note: The last note of the ranks, in quotes; "several", without quotes, if they differ.
        is_at_fault: Whether the diagnosis names the ranks.
    """

    ranks: tuple[int, ...]
    state: str
    operation: str = ""
    site: str = ""
    since: int = 0
    steps: tuple[int, ...] = ()
    note: str = ""
    is_at_fault: bool = False


def _build_rows(diagnosis: Diagnosis) -> list[_Row]:
    graph, at_fault = diagnosis.graph, diagnosis.ranks
    return [_build_row(graph, number, number in at_fault) for number in sorted(graph.ranks)]


def _fold_rows(rows: list[_Row]) -> list[_Row]:
    """Return a row for all ranks in the same state."""
    folded: dict[_Row, list[_Row]] = {}
    for row in rows:
        alike = replace(row, ranks=(), since=0, steps=(), note="")
        folded.setdefault(alike, []).append(row)
    return [_merge_rows(alike, parts) for alike, parts in folded.items()]


def _merge_rows(alike: _Row, parts: list[_Row]) -> _Row:
    ranks = tuple(number for row in parts for number in row.ranks)
    since = min((row.since for row in parts if row.since), default=0)
    steps = tuple(step for row in parts for step in row.steps)
    notes = {row.note for row in parts}
    note = notes.pop() if len(notes) == 1 else "several"
    return replace(alike, ranks=ranks, since=since, steps=steps, note=note)


def _build_table(diagnosis: Diagnosis) -> Table:
    """Return the rows as a rich table, with the ranks at fault in red."""
    graph, rows = diagnosis.graph, _build_rows(diagnosis)
    is_folded = len(rows) >= _FOLD_FROM
    found = _fold_rows(rows) if is_folded else rows
    shown = sorted(found, key=lambda row: not row.is_at_fault)[:_MAX_ROWS]
    shown.sort(key=lambda row: row.ranks)
    cells = [_format_cells(graph, row) for row in shown]
    empty = {"step": not any(row.steps for row in rows), "note": not any(row.note for row in rows)}
    hidden = {"pid": is_folded, **empty}
    names = [name for name in cells[0] if not hidden.get(name)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold", justify="right" if name == "step" else "left")
    for row, line in zip(shown, cells, strict=True):
        style = "bold red" if row.is_at_fault else None
        table.add_row(*(Text(line[name]) for name in names), style=style)
    if len(found) > len(shown):
        table.caption = f"and {len(found) - len(shown)} more: phalanx explain --json lists all"
    return table


def _format_cells(graph: WaitForGraph, row: _Row) -> dict[str, str]:
    pid = graph.ranks[row.ranks[0]].pid
    return {
        "rank": collapse_numbers(row.ranks),
        "pid": str(pid) if pid else "",
        "state": row.state,
        "operation": row.operation,
        "called at": row.site,
        "since": _format_since(graph, row.since),
        "step": collapse_numbers(row.steps),
        "note": row.note,
    }


def _format_since(graph: WaitForGraph, time: int) -> str:
    """Format a begin: as a duration ("34 s") in a live graph, else as a time ("14:03:22")."""
    clock = get_clock_offset(graph.job)
    if not time or not clock:
        return ""
    return format_duration(graph.job.now - time) if graph.is_live else format_time(time + clock)


def _build_row(graph: WaitForGraph, number: int, is_at_fault: bool) -> _Row:
    operation, before = graph.current_operation(number), graph.previous_operation(number)
    incomplete = find_incomplete_messages(graph, number)
    shown, step = next(iter(incomplete), operation or before), graph.ranks[number].last_step
    text = ""
    if shown is not None:
        text = format_for_column(graph, number, shown)
        text = f"{text} (not waited for)" if incomplete else text if operation else f"after {text}"
    return _Row(
        (number,),
        _describe_state(graph, number),
        text,
        "" if shown is None else format_call_site(shown),
        _get_state_start(graph, number),
        () if step is None else (step,),
        format_last_note(graph.ranks[number]),
        is_at_fault,
    )


def _get_state_start(graph: WaitForGraph, number: int) -> int:
    """Return the time at which the state of a rank began; 0 if unknown."""
    operation, status = graph.current_operation(number), graph.exits[number]
    if operation is not None:
        return operation.begin
    is_ended = status.time and graph.is_gone(number)
    return status.time if is_ended else graph.get_own_code_start(number)


def _describe_state(graph: WaitForGraph, number: int) -> str:
    """Describe the state of a rank, or how it ended, in a few words."""
    rank, status = graph.ranks[number], graph.exits[number]
    if rank.problem:
        return "flight recorder unreadable"
    if graph.is_on_other_host(number):
        return "on another host"
    if status.reason == "alive":
        return _describe_activity(graph, number)
    if status.reason == "launcher":
        by = "killed with" if graph.job.launcher_lost else "ended by"
        return f"{_describe_activity(graph, number)} (then {by} the launcher)"
    if status.reason == "failed":
        return get_group_error(rank) or f"failed: {escape(rank.exception.partition(':')[0], 40)}"
    return status.describe(_STATES)


def _describe_activity(graph: WaitForGraph, number: int) -> str:
    """Describe the activity of a rank at the graph's moment."""
    wait, failure = graph.waits.get(number), graph.failures.get(number)
    if graph.is_stopped(number):
        return "stopped by a signal"
    if not graph.ranks[number].opened:
        return "not joined yet" if graph.never_joined(number) else "no record"
    if failure is not None and graph.first_failure is not None:
        return f"raised {_ERRORS.get(failure.outcome) or escape(failure.outcome, 40)}"
    if wait is None:
        return "own code"
    if wait.any_of:
        if wait.operation.is_message:
            return "waits for any rank"
        return f"waits for some of {format_ranks(wait.peers)}"
    return f"waits for {format_ranks(wait.peers)}" if wait.peers else "in the operation"
