"""Ranks, operations and times in words. What the job wrote is escaped here, and nowhere later."""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

from phalanx.observe.culprit.waits import group_of
from phalanx.observe.escape import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.observe.culprit.waits import Scene
    from phalanx.observe.model import Group, Operation, Rank

__all__ = [
    "called_at",
    "clock_time",
    "collapsed",
    "in_column",
    "joined",
    "last_note",
    "last_step",
    "named",
    "operation_of",
    "span",
]

_SECOND = 1_000_000_000


def collapsed(numbers: Iterable[int]) -> str:
    """Numbers with their runs of three and more put together: "0-3, 7, 8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = (f"{a}-{b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1))) for a, b in runs)
    return ", ".join(shown)


def named(ranks: Sequence[int]) -> str:
    """Ranks by their numbers: "rank 3", "ranks 0 and 2", "ranks 0-3, 7"."""
    if len(ranks) == 2:
        return f"ranks {min(ranks)} and {max(ranks)}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {collapsed(ranks)}"


def joined(texts: Sequence[str]) -> str:
    """An enumeration: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def span(nanoseconds: int) -> str:
    """A time span: "0.2 s", "34 s", "5 min 3 s", "2 h 4 min"."""
    seconds = max(0, nanoseconds) / _SECOND
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole, unit, part, smaller = (
        (seconds // 60, "min", seconds % 60, "s")
        if seconds < 3600
        else (seconds // 3600, "h", seconds % 3600 // 60, "min")
    )
    return f"{whole:.0f} {unit}" + (f" {int(part)} {smaller}" if int(part) else "")


def clock_time(nanoseconds: int) -> str:
    """The local time of day of a Unix time in nanoseconds: "14:03:22"."""
    try:
        return datetime.fromtimestamp(nanoseconds / _SECOND).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):  # not a time that a calendar has
        return "?"


def last_step(rank: Rank) -> int | None:
    """The step that a rank reported last; a report without one has a step below zero."""
    return next((report.step for report in reversed(rank.reports) if report.step >= 0), None)


def last_note(rank: Rank) -> str:
    """What the rank said last that it is doing, in quotes; empty if it never did."""
    return f'"{escape(rank.note, 60)}"' if rank.note else ""


def called_at(operation: Operation) -> str:
    """Where an operation was called: "train.py:40"; empty if that isn't known."""
    return escape(os.path.basename(operation.site), 60)


def operation_of(scene: Scene, rank: int, operation: Operation) -> str:
    """An operation of a rank: 'all_reduce #41 float32[1024] SUM in group "pair"'."""
    parts = [_kind(operation)]
    if operation.kind == "join":
        return parts[0]
    if operation.dtype:
        parts.append(f"{escape(operation.dtype, 20)}[{operation.count}]")
    if operation.op:
        parts.append(escape(operation.op, 20))
    group = group_of(scene.ranks[rank], operation)
    other = scene.member(group, operation.peer)
    if operation.is_message:
        parts.append(_other_end(operation, other))
    elif operation.peer >= 0:
        parts.append(f"root {operation.peer if other is None else other}")
    return " ".join(parts) + _in_group(scene, rank, group)


def _kind(operation: Operation) -> str:
    """What an operation is called, with its number in the group."""
    if operation.kind == "join":
        return "joining the group"
    kind = escape(operation.kind, 40)
    if not operation.is_message and operation.sequence:
        kind += f" #{operation.sequence}"
    return kind


def in_column(scene: Scene, rank: int, operation: Operation) -> str:
    """An operation as the table shows it: 'all_reduce #41 in group "pair"', "recv from rank 3"."""
    group = group_of(scene.ranks[rank], operation)
    words = _kind(operation)
    if operation.is_message:
        words += f" {_other_end(operation, scene.member(group, operation.peer))}"
    return words + _in_group(scene, rank, group)


def _other_end(operation: Operation, other: int | None) -> str:
    """Whom a message is for or from: "to rank 3 tag 7"."""
    number = operation.peer if other is None else other
    end = "any rank" if operation.peer < 0 else f"rank {number}"
    tag = f" tag {operation.sequence}" if operation.sequence else ""
    return f"{'to' if operation.kind == 'send' else 'from'} {end}{tag}"


def _in_group(scene: Scene, rank: int, group: Group | None) -> str:
    if group is None or not _needs_name(scene, rank, group.size):
        return ""
    return f' in group "{escape(group.name, 40)}"'


def _needs_name(scene: Scene, rank: int, size: int) -> bool:
    """Whether it isn't clear which group is meant: it is a part, or another is as large."""
    sizes = [group.size for group in scene.ranks[rank].groups]
    return size != len(scene.ranks) or sizes.count(size) > 1
