"""The table of the ranks: where each was at the moment that explains the rest, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from phalanx.observe.culprit.endings import clock_of, signal_name, told_of
from phalanx.observe.culprit.holdups import in_own_code, is_elsewhere, is_stopped
from phalanx.observe.escape import escape
from phalanx.observe.explain.words import (
    called_at,
    clock_time,
    collapsed,
    in_column,
    last_note,
    last_step,
    named,
    span,
)

if TYPE_CHECKING:
    from phalanx.observe.culprit import Scene, Verdict
    from phalanx.observe.culprit.endings import How

__all__ = ["Row", "rows", "table"]

FOLDED_FROM = 9
"""Of so many ranks, those in the same state share a row."""
_MOST_ROWS = 64
_TOLD = {
    "peer_lost": "PeerLost",
    "left": "CollectiveMismatch",
    "mismatch": "CollectiveMismatch",
    "ring": "CollectiveMismatch",
    "timeout": "CollectiveTimeout",
    "aborted": "Aborted",
    "interrupted": "Aborted",
}
_STATES: dict[How, str] = {
    "vanished": "gone without a word",
    "interrupted": "interrupted (Ctrl-C)",
    "well": "ended",
    "absent": "no trace",
    "elsewhere": "on another machine",
    "left": "has left its groups",
}


@dataclass(frozen=True)
class Row:
    """One row: ranks that are in the same state.

    Attributes:
        ranks: Their numbers.
        state: What they do, or how they ended.
        operation: The operation that they are in, or came from.
        site: Where that was called.
        since: Since when; monotonic nanoseconds of the earliest, 0 if that isn't known.
        steps: The steps that they reported last.
        note: What they noted last, in quotes; "several" without, where they differ.
        culprit: Whether the verdict names them.
    """

    ranks: tuple[int, ...]
    state: str
    operation: str = ""
    site: str = ""
    since: int = 0
    steps: tuple[int, ...] = ()
    note: str = ""
    culprit: bool = False


def rows(scene: Scene, verdict: Verdict, *, fold: bool) -> list[Row]:
    """A row for each rank, or (`fold`) for all that are in the same state."""
    single = [_row(scene, number, number in verdict.ranks) for number in sorted(scene.ranks)]
    if not fold:
        return single
    folded: dict[Row, list[Row]] = {}
    for row in single:
        alike = replace(row, ranks=(), since=0, steps=(), note="")
        folded.setdefault(alike, []).append(row)
    return [_together(alike, parts) for alike, parts in folded.items()]


def table(scene: Scene, verdict: Verdict) -> Table:
    """The rows as a table of rich's; the culprits' are red."""
    fold = len(scene.ranks) >= FOLDED_FROM
    found = rows(scene, verdict, fold=fold)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    steps, notes = any(row.steps for row in found), any(row.note for row in found)
    absent = (("pid", fold), ("step", not steps), ("note", not notes))
    hidden = {name for name, empty in absent if empty}
    for name in ("rank", "pid", "state", "operation", "called at", "since", "step", "note"):
        if name not in hidden:
            made.add_column(name, overflow="fold", justify="right" if name == "step" else "left")
    shown = sorted(found, key=lambda row: not row.culprit)[:_MOST_ROWS]
    for row in sorted(shown, key=lambda row: row.ranks):
        cells = _cells(scene, row)
        made.add_row(
            *(Text(cell) for name, cell in cells.items() if name not in hidden),
            style="bold red" if row.culprit else None,
        )
    if len(found) > len(shown):
        made.caption = f"and {len(found) - len(shown)} more: phalanx explain --json lists all"
    return made


def _together(alike: Row, parts: list[Row]) -> Row:
    ranks = tuple(number for row in parts for number in row.ranks)
    since = min((row.since for row in parts if row.since), default=0)
    steps = tuple(step for row in parts for step in row.steps)
    notes = {row.note for row in parts}
    note = notes.pop() if len(notes) == 1 else "several"
    return replace(alike, ranks=ranks, since=since, steps=steps, note=note)


def _cells(scene: Scene, row: Row) -> dict[str, str]:
    pid = scene.ranks[row.ranks[0]].pid
    return {
        "rank": collapsed(row.ranks),
        "pid": str(pid) if pid else "",
        "state": row.state,
        "operation": row.operation,
        "called at": row.site,
        "since": _since(scene, row.since),
        "step": collapsed(row.steps),
        "note": row.note,
    }


def _since(scene: Scene, time: int) -> str:
    """How long something has lasted, "34 s", while the job runs; then when it began, "14:03:22"."""
    clock = clock_of(scene.job)
    if not time or not clock:
        return ""
    return span(scene.job.now - time) if scene.live else clock_time(time + clock)


def _row(scene: Scene, number: int, culprit: bool) -> Row:
    operation, before = scene.under_way(number), scene.before(number)
    shown, step = operation or before, last_step(scene.ranks[number])
    words = ""
    if shown is not None:
        words = ("" if operation is not None else "after ") + in_column(scene, number, shown)
    return Row(
        (number,),
        state(scene, number),
        words,
        "" if shown is None else called_at(shown),
        _began(scene, number),
        () if step is None else (step,),
        last_note(scene.ranks[number]),
        culprit,
    )


def _began(scene: Scene, number: int) -> int:
    """When the state of a rank began; 0 if that isn't known."""
    operation, end = scene.under_way(number), scene.ends[number]
    if operation is not None:
        return operation.begin
    return end.time if end.time and scene.gone(number) else in_own_code(scene, number)


def state(scene: Scene, number: int) -> str:
    """What a rank does, or how it ended, in a few words."""
    rank, end = scene.ranks[number], scene.ends[number]
    if rank.problem:
        return "black box unreadable"
    if is_elsewhere(scene, number):
        return "on another host"
    if end.how == "alive":
        return _doing(scene, number)
    if end.how == "launcher":
        return f"{_doing(scene, number)} (then ended by the launcher)"
    if end.how == "failed":
        return told_of(rank) or f"failed: {escape(rank.last_words.partition(':')[0], 40)}"
    if end.how == "killed":
        return f"killed by {signal_name(-(end.code or 0))}"
    if end.how == "exited":
        return f"exited with code {end.code}"
    return _STATES.get(end.how, end.how)


def _doing(scene: Scene, number: int) -> str:
    """What a rank did at the moment."""
    wait, trouble = scene.waits.get(number), scene.troubles.get(number)
    if is_stopped(scene, number):
        return "stopped by a signal"
    if not scene.ranks[number].opened:
        return "not joined yet"
    if trouble is not None and scene.trouble is not None:
        return f"raised {_TOLD.get(trouble.outcome) or escape(trouble.outcome, 40)}"
    if wait is None:
        return "own code"
    if wait.any_of:
        return "waits for any rank"
    return f"waits for {named(wait.peers)}" if wait.peers else "in the operation"
