"""The table of the ranks: the state of each at the moment of the failure, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from phalanx.observe.diagnosis.blocked_ranks import get_own_code_start, is_on_other_host, is_stopped
from phalanx.observe.diagnosis.exit_reasons import get_clock_offset, get_phalanx_error
from phalanx.observe.diagnosis.messages import find_incomplete_messages
from phalanx.observe.escape import escape
from phalanx.observe.explain.formatting import (
    collapse_numbers,
    format_call_site,
    format_duration,
    format_for_column,
    format_last_note,
    format_ranks,
    format_time,
    get_last_step,
)
from phalanx.system.signals import signal_name

if TYPE_CHECKING:
    from phalanx.observe.diagnosis import Diagnosis, WaitForGraph
    from phalanx.observe.diagnosis.exit_reasons import ExitReason

__all__ = ["Row", "build_rows", "build_table"]

FOLD_FROM = 9
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
_STATES: dict[ExitReason, str] = {
    "vanished": "disappeared",
    "interrupted": "interrupted (Ctrl-C)",
    "completed": "ended",
    "absent": "no trace",
    "other_host": "on another host",
    "left": "left its groups",
}


@dataclass(frozen=True)
class Row:
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


def build_rows(graph: WaitForGraph, diagnosis: Diagnosis, *, fold: bool) -> list[Row]:
    """Return a row for each rank or, if `fold` is true, for all ranks in the same state."""
    single = [
        _build_row(graph, number, number in diagnosis.ranks) for number in sorted(graph.ranks)
    ]
    if not fold:
        return single
    folded: dict[Row, list[Row]] = {}
    for row in single:
        alike = replace(row, ranks=(), since=0, steps=(), note="")
        folded.setdefault(alike, []).append(row)
    return [_merge_rows(alike, parts) for alike, parts in folded.items()]


def build_table(graph: WaitForGraph, diagnosis: Diagnosis) -> Table:
    """Return the rows as a rich table, with the ranks at fault in red."""
    fold = len(graph.ranks) >= FOLD_FROM
    found = build_rows(graph, diagnosis, fold=fold)
    rich_table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    steps, notes = any(row.steps for row in found), any(row.note for row in found)
    absent = (("pid", fold), ("step", not steps), ("note", not notes))
    hidden = {name for name, empty in absent if empty}
    for name in ("rank", "pid", "state", "operation", "called at", "since", "step", "note"):
        if name not in hidden:
            rich_table.add_column(
                name, overflow="fold", justify="right" if name == "step" else "left"
            )
    shown = sorted(found, key=lambda row: not row.is_at_fault)[:_MAX_ROWS]
    for row in sorted(shown, key=lambda row: row.ranks):
        cells = _format_cells(graph, row)
        rich_table.add_row(
            *(Text(cell) for name, cell in cells.items() if name not in hidden),
            style="bold red" if row.is_at_fault else None,
        )
    if len(found) > len(shown):
        rich_table.caption = f"and {len(found) - len(shown)} more: phalanx explain --json lists all"
    return rich_table


def _merge_rows(alike: Row, parts: list[Row]) -> Row:
    ranks = tuple(number for row in parts for number in row.ranks)
    since = min((row.since for row in parts if row.since), default=0)
    steps = tuple(step for row in parts for step in row.steps)
    notes = {row.note for row in parts}
    note = notes.pop() if len(notes) == 1 else "several"
    return replace(alike, ranks=ranks, since=since, steps=steps, note=note)


def _format_cells(graph: WaitForGraph, row: Row) -> dict[str, str]:
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


def _build_row(graph: WaitForGraph, number: int, is_at_fault: bool) -> Row:
    operation, before = graph.current_operation(number), graph.previous_operation(number)
    incomplete = find_incomplete_messages(graph, number)
    shown, step = next(iter(incomplete), operation or before), get_last_step(graph.ranks[number])
    text = ""
    if shown is not None:
        text = format_for_column(graph, number, shown)
        text = f"{text} (not waited for)" if incomplete else text if operation else f"after {text}"
    return Row(
        (number,),
        describe_state(graph, number),
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
    return (
        status.time if status.time and graph.is_gone(number) else get_own_code_start(graph, number)
    )


def describe_state(graph: WaitForGraph, number: int) -> str:
    """Describe the state of a rank, or how it ended, in a few words."""
    rank, status = graph.ranks[number], graph.exits[number]
    if rank.problem:
        return "flight recorder unreadable"
    if is_on_other_host(graph, number):
        return "on another host"
    if status.reason == "alive":
        return _describe_activity(graph, number)
    if status.reason == "launcher":
        by = "killed with" if graph.job.launcher_lost else "ended by"
        return f"{_describe_activity(graph, number)} (then {by} the launcher)"
    if status.reason == "failed":
        return get_phalanx_error(rank) or f"failed: {escape(rank.exception.partition(':')[0], 40)}"
    if status.reason == "killed":
        return f"killed by {signal_name(-(status.code or 0))}"
    if status.reason == "exited":
        return f"exited with code {status.code}"
    return _STATES.get(status.reason, status.reason)


def _describe_activity(graph: WaitForGraph, number: int) -> str:
    """Describe the activity of a rank at the graph's moment."""
    wait, failure = graph.waits.get(number), graph.failures.get(number)
    if is_stopped(graph, number):
        return "stopped by a signal"
    if not graph.ranks[number].opened:
        return "not joined yet"
    if failure is not None and graph.first_failure is not None:
        return f"raised {_ERRORS.get(failure.outcome) or escape(failure.outcome, 40)}"
    if wait is None:
        return "own code"
    if wait.any_of:
        return "waits for any rank"
    return f"waits for {format_ranks(wait.peers)}" if wait.peers else "in the operation"
