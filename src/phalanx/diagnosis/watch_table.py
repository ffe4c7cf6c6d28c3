"""Rendering of the view of `watch` as a table that fits the terminal, and as text.

Text from the job is escaped here. Nothing is omitted silently: truncated text ends in an ellipsis,
and ranks without a line of their own are counted in lines that describe their state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from phalanx.diagnosis.formatting import (
    describe_other_jobs,
    format_call_site,
    format_duration,
    format_ranks,
)
from phalanx.diagnosis.kinds.pending_calls import format_call_lines
from phalanx.diagnosis.wait_for_graph import WaitForGraph
from phalanx.diagnosis.watch import NOTICED
from phalanx.system.escape import escape

if TYPE_CHECKING:
    from phalanx.diagnosis.model import Job, Operation
    from phalanx.diagnosis.watch import Activity, Row, View

_WIDE = 100
"""Terminal width, in columns, from which on the state of every process is shown."""
_FOLDS = 4
"""Maximum number of lines for ranks without a line of their own."""
_NOTES = 3
_LINKS = 8
"""Maximum number of lines for links between hosts."""
_HOST = 40
"""Maximum number of characters of a host's name."""
_NOTE = 60
"""Maximum number of characters of a rank's note."""
_NARROWEST = 12
_LINES_OF_A_RANK = 4
"""Lines per rank that must be available to wrap the text of a rank instead of truncating it."""
_NO_VALUE = "-"
_NOT_WAITING = "not waiting"
_FROM = ("recv", "broadcast", "scatter")
_TO = ("send", "reduce", "gather")


@dataclass(frozen=True)
class Fold:
    """Ranks that share a line, in order, and their common state: "waiting for rank 3"."""

    rows: tuple[Row, ...]
    state: str

    def __str__(self) -> str:
        parts = [f"... and {len(self.rows)} more {self.state}"]
        shares = [row.waiting for row in self.rows if row.waiting is not None]
        if shares and self.state.startswith("waiting for ") and self.state != _NOT_WAITING:
            parts.append(f"{sum(shares) / len(shares):.0%} of their time")
        if steps := sorted(row.step for row in self.rows if row.step is not None):
            same = steps[0] == steps[-1]
            parts.append(f"step {steps[0]}" if same else f"steps {steps[0]} to {steps[-1]}")
        parts.append(format_ranks([row.rank for row in self.rows]))
        return ", ".join(parts)


def render(job: Job, view: View, console: Console, height: int | None = None) -> Group:
    """Render the table, with a title above it and notes below.

    Args:
        job: The job.
        view: The view of the job.
        console: The console whose width must not be exceeded.
        height: The available number of lines; None for no limit.
    """
    above = [_build_title(job, console.width), describe_balance(job, view)]
    below = [*_build_links(view), *_build_notes(job, view)]
    room = None
    if height is not None:
        taken = sum(len(text.wrap(console, console.width)) for text in (*above, *below))
        room = max(height - taken - 1, 1)
    shown, folds = fold(view, room)
    lines = [Text(str(one), style="dim", no_wrap=True, overflow="ellipsis") for one in folds]
    wrap = room is None or _LINES_OF_A_RANK * len(shown) <= room
    return Group(*above, _build_table(view, shown, console.width, wrap), *lines, *below)


def fold(view: View, room: int | None) -> tuple[list[Row], list[Fold]]:
    """Choose the ranks with a line of their own and fold the others, to fit into `room` lines.

    The straggler and abnormal ranks are the last to be folded.
    """
    rows = list(view.rows)
    if room is None or len(rows) <= room:
        return rows, []
    rows.sort(key=lambda row: (not _has_priority(row, view), row.rank))
    most = min(_FOLDS, room)
    own = next(
        own for own in range(room, -1, -1) if own + len(_build_folds(rows[own:], most)) <= room
    )
    return sorted(rows[:own], key=_get_rank), _build_folds(rows[own:], most)


def describe_balance(job: Job, view: View) -> Text:
    """Describe in a sentence or two the rank that delays others."""
    text = ""
    if (straggler := view.straggler) is not None:
        row = next(row for row in view.rows if row.rank == straggler.rank)
        many = len(straggler.waiting)
        waiters = f"rank {straggler.waiting[0]} waits" if many == 1 else f"{many} ranks wait"
        state = f"{row.state}, " if row.is_abnormal else ""
        text = (
            f"Rank {row.rank} delays the others: {waiters} for it {straggler.share:.0%} of the "
            f"time ({state}{describe_activity(row)})."
        )
    if view.balance == "straggler":
        return Text(text, style="bold yellow")
    if view.balance == "stuck":
        stuck = "No progress: every live rank is waiting."
        return Text(f"{stuck} {text} See: phalanx explain {escape(job.name)}", style="bold red")
    if view.balance == "balanced":
        return Text(f"Balanced: no rank delays the others (waits of at most {view.max_share:.0%}).")
    if view.balance == "ended":
        return Text("All ranks have ended. The table shows their last operations.")
    if view.balance == "not_joined":
        return Text("No rank has joined a group yet.")
    if view.balance == "single_rank":
        return Text("The job has a single rank.")
    return Text("Balanced: no rank waits noticeably for another.")


def describe_activity(row: Row) -> str:
    """Describe the activity of a rank, the most important details first."""
    activity = row.activity
    if row.problem:
        return f"unreadable flight recorder: {escape(row.problem)}"
    if row.exit_status.reason == "absent":
        return "left no trace"
    note = [f'"{escape(row.note, _NOTE)}"'] if row.note else []
    operation, details = activity.operation, _format_details(activity)
    shown = "no operation" if operation is None else _format_operation(activity, operation)
    seconds = activity.seconds
    duration = "< 0.1 s" if seconds < 0.05 else format_duration(int(seconds * 1e9))
    after = [f"after {shown}"] if operation is not None else []
    if not row.is_alive:
        last = [f"was in {shown}", duration, *details] if activity.under_way else after or [shown]
        return ", ".join([*last, *note])
    if not row.has_joined:
        return f"not joined yet, {duration}"
    if activity.under_way:
        peer = [f"waits for {activity.waits_for}"] if activity.waits_for >= 0 else []
        progress = [f"{operation.progress}% done"] if operation and operation.progress else []
        parts = [shown, *progress, *peer, duration, *note, *details]
    else:
        parts = ["own code", duration, *note, *after]
    if activity.num_other_operations:
        parts.append(f"{activity.num_other_operations} more under way")
    return ", ".join(parts)


def _has_priority(row: Row, view: View) -> bool:
    return row.is_abnormal or (view.straggler is not None and row.rank == view.straggler.rank)


def _build_folds(rows: Sequence[Row], most: int) -> list[Fold]:
    alike: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_get_rank):
        alike.setdefault(_describe_fold(row), []).append(row)
    found = [Fold(tuple(some), state) for state, some in alike.items()]
    found.sort(key=lambda one: (-len(one.rows), one.rows[0].rank))
    if len(found) > most:
        rest = sorted((row for one in found[most - 1 :] for row in one.rows), key=_get_rank)
        found[most - 1 :] = [Fold(tuple(rest), "in other states")]
    return found


def _get_rank(row: Row) -> int:
    return row.rank


def _describe_fold(row: Row) -> str:
    if row.problem:
        return "with unreadable flight recorders"
    if not row.is_alive or row.state in ("stopped", "disk"):
        return f"in state {row.state}"
    if (row.waiting or 0.0) < NOTICED:
        return _NOT_WAITING
    return (
        f"waiting for rank {row.waits_for}"
        if _waits_mostly_for_one(row)
        else "waiting for several ranks"
    )


def _build_title(job: Job, width: int) -> Text:
    parts = [escape(job.name)]
    if job.command:
        parts.append(escape(" ".join(job.command), 60 if width >= _WIDE else 40))
    parts.append(f"{job.world_size} rank{'s' if job.world_size != 1 else ''}")
    opened = [rank.opened for rank in job.ranks if rank.opened]
    if opened and job.running:
        parts.append(format_duration(job.now - min(opened)))
    if job.attempt:
        parts.append(f"attempt {job.attempt + 1}")
    if job.replaced:
        parts.append(f"{len(job.replaced)} replaced")
    return Text(" · ".join(parts), style="bold")


def _build_notes(job: Job, view: View) -> list[Text]:
    texts = [f"note: {escape(problem)}" for problem in job.problems]
    if others := describe_other_jobs(job, "watch"):
        texts.insert(0, others)
    if len(texts) > _NOTES:
        texts[_NOTES - 1 :] = [f"note: {len(texts) - _NOTES + 1} more notes: see phalanx explain"]
    if job.workers and (calls := format_call_lines(WaitForGraph(job), _NOTES)):
        texts += ["Pending remote calls:", *calls]
    if view.rows and not view.has_reports:
        texts.append(
            "No progress is reported. To show it here, call phalanx.report(step=..., loss=...)."
        )
    return [Text(text, style="dim") for text in texts]


def _build_links(view: View) -> list[Text]:
    """Return a line for each link to another host, those that send most first."""
    links = sorted(view.links, key=lambda link: -link.send_rate)
    has_several_hosts = len({link.host for link in links}) > 1
    lines = [
        f"Link {f'from {escape(link.host, _HOST)} ' if has_several_hosts else ''}"
        f"to {escape(link.peer, _HOST)}: "
        f"sends {_format_bytes(link.send_rate)}/s, receives {_format_bytes(link.receive_rate)}/s; "
        f"so far {_format_bytes(link.sent)} and {_format_bytes(link.received)}"
        for link in links
    ]
    if len(lines) > _LINKS:
        lines[_LINKS - 1 :] = [f"... and {len(lines) - _LINKS + 1} more links"]
    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]


def _format_bytes(value: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= 0.9995 * limit:
            digits = f"{value / limit:.3g}"
            return f"{digits if 'e' not in digits else round(value / limit)} {unit}"
    return f"{value:.0f} B"


def _build_table(view: View, rows: Sequence[Row], width: int, wrap: bool) -> Table:
    names = ["rank", *(("step", "steps/s") if view.has_steps else ("ops/s",))]
    names += ["loss"] if view.has_reports else []
    names += ["waiting", "memory"]
    if width >= _WIDE or any(row.is_abnormal or not row.is_alive for row in view.rows):
        names.append("process")
    gap = 1 if width < _WIDE else 2
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    cells = [_format_cells(row) for row in rows]
    left = width
    for name in names:
        wide = max(len(name), *(len(line[name]) for line in cells), 0)
        left -= wide + gap
        justify: Literal["left", "right"] = "left" if name == "process" else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=wide)
    overflow: Literal["fold", "ellipsis"] = "fold" if wrap else "ellipsis"
    last = max(left, _NARROWEST)
    table.add_column("activity", no_wrap=not wrap, overflow=overflow, max_width=last)
    for row, line in zip(rows, cells, strict=True):
        texts = [*(line[name] for name in names), describe_activity(row)]
        table.add_row(*map(Text, texts), style=_choose_style(row, view))
    return table


def _format_cells(row: Row) -> dict[str, str]:
    return {
        "rank": str(row.rank),
        "step": _NO_VALUE if row.step is None else str(row.step),
        "steps/s": _NO_VALUE if row.steps is None else _format_rate(row.steps),
        "ops/s": _format_rate(row.operations),
        "loss": _NO_VALUE if row.loss is None else f"{row.loss:.4g}",
        "waiting": _format_waiting(row),
        "memory": _format_memory(row),
        "process": row.state,
    }


def _choose_style(row: Row, view: View) -> str:
    status = row.exit_status
    if status.is_own_failure or status.reason == "absent" or row.state == "stopped":
        return "red"
    if view.straggler is not None and view.straggler.rank == row.rank:
        return "yellow"
    return "" if row.is_alive else "dim"


def _format_rate(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if abs(value) >= 1e5:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _format_waiting(row: Row) -> str:
    if row.waiting is None:
        return _NO_VALUE
    most = row.waits.get(row.waits_for, 0.0)
    if row.waits_for < 0 or most < 0.005:
        return f"{row.waiting:.0%}"
    if _waits_mostly_for_one(row):
        return f"{row.waiting:.0%} for {row.waits_for}"
    return f"{row.waiting:.0%} ({most:.0%} for {row.waits_for})"


def _waits_mostly_for_one(row: Row) -> bool:
    """Return whether a rank waits almost only for a single other rank."""
    return row.waits_for >= 0 and row.waits[row.waits_for] >= 0.8 * (row.waiting or 0.0)


def _format_memory(row: Row) -> str:
    if row.memory is None:
        return _NO_VALUE
    size = row.memory / 2**20
    return f"{size:.0f} MiB" if size < 1000 else f"{size / 1024:.1f} GiB"


def _format_operation(activity: Activity, operation: Operation) -> str:
    """Describe an operation with its peer and its call site."""
    text = escape(operation.kind, 40)
    if operation.kind in (*_FROM, *_TO):
        way = "from" if operation.kind in _FROM else "to"
        text += f" {way} {activity.peer if activity.peer >= 0 else 'any'}"
    if operation.site:
        text += f" at {format_call_site(operation)}"
    return text


def _format_details(activity: Activity) -> list[str]:
    operation = activity.operation
    if operation is None:
        return []
    parts = [f"tag {operation.sequence}" if operation.is_message else f"#{operation.sequence}"]
    if operation.dtype:
        reduction = f" {escape(operation.op, 20)}" if operation.op else ""
        parts.append(f"{escape(operation.dtype, 20)}[{operation.count}]{reduction}")
    parts += [f"in {escape(activity.group, 40)}"] if activity.group else []
    return parts
