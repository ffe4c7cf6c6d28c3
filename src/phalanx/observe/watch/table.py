"""The view of `watch` as a table that fits the terminal, and in words.

What comes from the job is escaped here. Nothing is left out in silence: a text that is cut ends in
an ellipsis, and ranks that have no line of their own are counted in lines that say what they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from phalanx.observe.escape import escape
from phalanx.observe.explain.words import called_at, named, span
from phalanx.observe.shares import over

if TYPE_CHECKING:
    from phalanx.observe.model import Job, Operation
    from phalanx.observe.watch.view import Activity, Row, View

__all__ = ["Fold", "activity", "fold", "render", "verdict"]

_WIDE = 100
"""Columns of a terminal from which on the state of every process is shown."""
_FOLDS = 4
"""Lines at most for the ranks that have none of their own."""
_NOTES = 3
_NOTE = 60
"""Characters of what a rank noted."""
_NARROWEST = 12
_LINES_OF_A_RANK = 4
"""Where there is room for so many, the text of a rank is wrapped instead of cut."""
_NOTICED = 0.05
_ABSENT = "-"
_NOBODY = "waiting for nobody"
_FROM = ("recv", "broadcast", "scatter")
_TO = ("send", "reduce", "gather")


@dataclass(frozen=True)
class Fold:
    """Ranks that share a line, by rank, and what they have in common: "waiting for rank 3"."""

    rows: tuple[Row, ...]
    what: str

    def __str__(self) -> str:
        words = [f"... and {len(self.rows)} more {self.what}"]
        shares = [row.waiting for row in self.rows if row.waiting is not None]
        if shares and self.what.startswith("waiting for ") and self.what != _NOBODY:
            words.append(f"{sum(shares) / len(shares):.0%} of their time")
        if steps := sorted(row.step for row in self.rows if row.step is not None):
            same = steps[0] == steps[-1]
            words.append(f"step {steps[0]}" if same else f"steps {steps[0]} to {steps[-1]}")
        words.append(named([row.rank for row in self.rows]))
        return ", ".join(words)


def render(job: Job, seen: View, console: Console, height: int | None = None) -> Group:
    """Draw the table, with what belongs above and below it.

    Args:
        job: As it was read.
        seen: The view of it.
        console: Whose width is to be kept.
        height: Lines that there are; None: as many as there are ranks.
    """
    above = [_title(job, console.width), verdict(job, seen)]
    below = _notes(job, seen)
    room = None
    if height is not None:
        taken = sum(len(text.wrap(console, console.width)) for text in (*above, *below))
        room = max(height - taken - 1, 1)
    shown, folds = fold(seen, room)
    lines = [Text(str(one), style="dim", no_wrap=True, overflow="ellipsis") for one in folds]
    wrap = room is None or _LINES_OF_A_RANK * len(shown) <= room
    return Group(*above, _table(seen, shown, console.width, wrap), *lines, *below)


def fold(seen: View, room: int | None) -> tuple[list[Row], list[Fold]]:
    """Choose which ranks get a line of their own, and put the others together, in `room` lines.

    The straggler, and ranks that aren't as they should be, are the last to lose theirs.
    """
    rows = list(seen.rows)
    if room is None or len(rows) <= room:
        return rows, []
    rows.sort(key=lambda row: (not _comes_first(row, seen), row.rank))
    most = min(_FOLDS, room)
    own = next(own for own in range(room, -1, -1) if own + len(_folds(rows[own:], most)) <= room)
    return sorted(rows[:own], key=_rank), _folds(rows[own:], most)


def verdict(job: Job, seen: View) -> Text:
    """Say in a sentence or two who holds up whom."""
    straggler = seen.straggler
    words = ""
    if straggler is not None:
        row = next(row for row in seen.rows if row.rank == straggler.rank)
        many = len(straggler.waiting)
        who = f"rank {straggler.waiting[0]} waits" if many == 1 else f"{many} ranks wait"
        words = f"Rank {row.rank} holds up others: {who} for it {straggler.share:.0%} of the time"
        words += f" ({_state(row)}{activity(row)})."
    if seen.verdict == "straggler":
        return Text(words, style="bold yellow")
    if seen.verdict == "stuck":
        stuck = "Nothing moves: every rank that is alive waits."
        return Text(f"{stuck} {words} See: phalanx explain {escape(job.name)}", style="bold red")
    if seen.verdict == "even":
        return Text(f"All are even: no rank holds up others (waits of at most {seen.most:.0%}).")
    if seen.verdict == "over":
        return Text("All ranks have ended: this is what they were in.")
    if seen.verdict == "alone":
        return Text("One rank: it has nobody to wait for.")
    return Text("All are even: no rank waits noticeably for another.")


def activity(row: Row) -> str:
    """What a rank is in, in words, the telling ones first."""
    now = row.activity
    if row.problem:
        return f"its black box can't be read: {escape(row.problem)}"
    if row.end.how == "absent":
        return "left no trace"
    note = [f'"{escape(row.note, _NOTE)}"'] if row.note else []
    if over(row.end):
        return ", ".join([_last_of(now), *note])
    if now.under_way:
        whom = [f"waits for {now.waits_for}"] if now.waits_for >= 0 else []
        words = [_call(now), *whom, _for(now.seconds), *note, *_details(now)]
    else:
        words = ["own code", _for(now.seconds), *note]
        words += [f"after {_call(now)}"] if now.operation else []
    words += [f"{now.others} more under way"] if now.others else []
    return ", ".join(words)


def _last_of(now: Activity) -> str:
    """What a rank was in that has ended."""
    if now.operation is None:
        return "no operation"
    if not now.under_way:
        return f"after {_call(now)}"
    return ", ".join([f"was in {_call(now)}", _for(now.seconds), *_details(now)])


def _for(seconds: float) -> str:
    return "< 0.1 s" if seconds < 0.05 else span(int(seconds * 1e9))


def _comes_first(row: Row, seen: View) -> bool:
    return row.abnormal or (seen.straggler is not None and row.rank == seen.straggler.rank)


def _folds(rows: Sequence[Row], most: int) -> list[Fold]:
    alike: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_rank):
        alike.setdefault(_fate(row), []).append(row)
    found = [Fold(tuple(some), what) for what, some in alike.items()]
    found.sort(key=lambda one: (-len(one.rows), one.rows[0].rank))
    if len(found) > most:
        rest = sorted((row for one in found[most - 1 :] for row in one.rows), key=_rank)
        found[most - 1 :] = [Fold(tuple(rest), "of several kinds")]
    return found


def _rank(row: Row) -> int:
    return row.rank


def _fate(row: Row) -> str:
    if row.problem:
        return "whose black boxes can't be read"
    if not row.alive or row.state in ("stopped", "disk"):
        return f"in state {row.state}"
    if (row.waiting or 0.0) < _NOTICED:
        return _NOBODY
    return f"waiting for rank {row.waits_for}" if _mostly(row) else "waiting for several ranks"


def _title(job: Job, width: int) -> Text:
    words = [escape(job.name)]
    if job.command:
        words.append(escape(" ".join(job.command), 60 if width >= _WIDE else 40))
    words.append(f"{job.world_size} rank{'s' if job.world_size != 1 else ''}")
    opened = [rank.opened for rank in job.ranks if rank.opened]
    if opened and job.running:
        words.append(span(job.now - min(opened)))
    if job.attempt:
        words.append(f"attempt {job.attempt + 1}")
    return Text(" · ".join(words), style="bold")


def _notes(job: Job, seen: View) -> list[Text]:
    texts = [f"note: {escape(problem)}" for problem in job.problems]
    if len(texts) > _NOTES:
        texts[_NOTES - 1 :] = [f"note: {len(texts) - _NOTES + 1} more of such: phalanx explain"]
    if seen.rows and not seen.reported:
        texts.append("No progress is reported: phalanx.report(step=..., loss=...) shows it here.")
    return [Text(text, style="dim") for text in texts]


def _table(seen: View, rows: Sequence[Row], width: int, wrap: bool) -> Table:
    columns: list[tuple[str, Callable[[Row], str]]] = [("rank", lambda row: str(row.rank))]
    if seen.has_steps:
        columns += [("step", _step), ("steps/s", _steps), ("loss", _loss)]
    else:
        columns += [("ops/s", lambda row: _rate(row.operations))]
        columns += [("loss", _loss)] if seen.reported else []
    columns += [("waiting", _waiting), ("memory", _memory)]
    if width >= _WIDE or any(row.abnormal or not row.alive for row in seen.rows):
        columns.append(("process", lambda row: row.state))
    gap = 1 if width < _WIDE else 2
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    cells = [[value(row) for _, value in columns] for row in rows]
    left = width
    for number, (name, _) in enumerate(columns):
        wide = max(len(name), *(len(line[number]) for line in cells), 0)
        left -= wide + gap
        justify: Literal["left", "right"] = "left" if name == "process" else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=wide)
    last = max(left, _NARROWEST)
    table.add_column(
        "in", no_wrap=not wrap, overflow="fold" if wrap else "ellipsis", max_width=last
    )
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*map(Text, line), Text(activity(row)), style=_style(row, seen))
    return table


def _style(row: Row, seen: View) -> str:
    if row.end.by_itself or row.end.how == "absent" or row.state == "stopped":
        return "red"
    if seen.straggler is not None and seen.straggler.rank == row.rank:
        return "yellow"
    return "" if row.alive else "dim"


def _step(row: Row) -> str:
    return _ABSENT if row.step is None else str(row.step)


def _steps(row: Row) -> str:
    return _ABSENT if row.steps is None else _rate(row.steps)


def _loss(row: Row) -> str:
    if row.loss is None:
        return _ABSENT
    return f"{row.loss:.4g}"


def _rate(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if abs(value) >= 1e5:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _waiting(row: Row) -> str:
    if row.waiting is None:
        return _ABSENT
    most = row.waits.get(row.waits_for, 0.0)
    if row.waits_for < 0 or most < 0.005:
        return f"{row.waiting:.0%}"
    if _mostly(row):
        return f"{row.waiting:.0%} for {row.waits_for}"
    return f"{row.waiting:.0%} ({most:.0%} for {row.waits_for})"


def _mostly(row: Row) -> bool:
    """Whether it is one rank that a rank waits for, but for a little."""
    return row.waits_for >= 0 and row.waits[row.waits_for] >= 0.8 * (row.waiting or 0.0)


def _memory(row: Row) -> str:
    if row.memory is None:
        return _ABSENT
    size = row.memory / 2**20
    return f"{size:.0f} MiB" if size < 1000 else f"{size / 1024:.1f} GiB"


def _state(row: Row) -> str:
    return f"{row.state}, " if row.abnormal else ""


def _call(now: Activity) -> str:
    """An operation, its partner and its call site."""
    operation = now.operation
    if operation is None:
        return "nothing"
    words = escape(operation.kind, 40)
    if operation.kind in (*_FROM, *_TO):
        way = "from" if operation.kind in _FROM else "to"
        words += f" {way} {now.peer if now.peer >= 0 else 'any'}"
    if operation.site:
        words += f" at {called_at(operation)}"
    return words


def _details(now: Activity) -> list[str]:
    operation = now.operation
    if operation is None:
        return []
    words = [f"tag {operation.sequence}" if operation.is_message else f"#{operation.sequence}"]
    words += [_shape(operation)] if operation.dtype else []
    words += [f"in {escape(now.group, 40)}"] if now.group else []
    return words


def _shape(operation: Operation) -> str:
    reduction = f" {escape(operation.op, 20)}" if operation.op else ""
    return f"{escape(operation.dtype, 20)}[{operation.count}]{reduction}"
