"""Formatting of ranks, operations and times; text from the job is escaped here, and not later."""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

from phalanx.system.escape import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.diagnosis.model import Group, Job, Operation, Rank
    from phalanx.diagnosis.wait_for_graph import WaitForGraph

_SECOND = 1_000_000_000
_MAX_JOBS = 3


def describe_other_jobs(job: Job, command: str) -> str:
    """Return a sentence about other running jobs; empty if there are none."""
    count = len(job.other_jobs)
    if not count:
        return ""
    shown = [*job.other_jobs[:_MAX_JOBS], *([f"{count - _MAX_JOBS} more"] * (count > _MAX_JOBS))]
    run = "another job is running" if count == 1 else f"{count} other jobs are running"
    selected = "it" if count == 1 else "one of them"
    return (
        f"This is the newest job; {run}: {join_texts(shown)}. To select {selected}, use "
        f"`phalanx {command} NAME`."
    )


def collapse_numbers(numbers: Iterable[int]) -> str:
    """Format numbers, with runs of three or more as a range: "0-3, 7, 8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = (f"{a}-{b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1))) for a, b in runs)
    return ", ".join(shown)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks: "rank 3", "ranks 0 and 2", "ranks 0-3, 7"."""
    if len(ranks) == 2:
        return f"ranks {min(ranks)} and {max(ranks)}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {collapse_numbers(ranks)}"


def join_texts(texts: Sequence[str]) -> str:
    """Join texts to an enumeration: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def format_duration(nanoseconds: int) -> str:
    """Format a duration: "0.2 s", "34 s", "5 min 3 s", "2 h 4 min"."""
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


def format_time(nanoseconds: int) -> str:
    """Format a Unix time in nanoseconds as the local time of day: "14:03:22"."""
    try:
        return datetime.fromtimestamp(nanoseconds / _SECOND).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):  # outside the calendar's range
        return "?"


def format_last_note(rank: Rank) -> str:
    """Return the last note of a rank in quotes; empty if there is none."""
    return f'"{escape(rank.note, 60)}"' if rank.note else ""


def format_call_site(operation: Operation) -> str:
    """Return the call site of an operation: "train.py:40"; empty if unknown."""
    return format_site(operation.site)


def format_site(site: str) -> str:
    """Return a recorded call site without its directories."""
    return escape(os.path.basename(site), 60)


def format_tensor(operation: Operation) -> str:
    """Describe the tensor of an operation: "float32[1024]"."""
    return f"{escape(operation.dtype, 20)}[{operation.count}]"


def format_operation(graph: WaitForGraph, rank: int, operation: Operation) -> str:
    """Describe an operation of a rank: 'all_reduce #41 float32[1024] SUM in group "pair"'."""
    if operation.kind == "join":
        return format_kind(operation)
    group = graph.ranks[rank].get_group(operation)
    other = graph.get_global_rank(group, operation.peer)
    text = format_call(operation, operation.peer if other is None else other)
    return text + _format_group(graph, rank, group)


def format_call(operation: Operation, peer: int) -> str:
    """Describe an operation without its group: "recv float32[5] from rank 4 tag 7".

    Args:
        operation: The operation.
        peer: The number of its root, or of the other rank of a message; negative for none or any.
    """
    parts = [format_kind(operation)]
    if operation.dtype:
        parts.append(format_tensor(operation))
    if operation.op:
        parts.append(escape(operation.op, 20))
    if operation.is_message:
        parts.append(format_peer(operation.kind, peer, operation.sequence))
    elif peer >= 0:
        parts.append(f"root {peer}")
    return " ".join(parts)


def format_kind(operation: Operation) -> str:
    """Return the name of an operation, with its number in the group."""
    if operation.kind == "join":
        return "joining the group"
    kind = escape(operation.kind, 40)
    if not operation.is_message and operation.sequence:
        kind += f" #{operation.sequence}"
    return kind


def format_for_column(graph: WaitForGraph, rank: int, operation: Operation) -> str:
    """Describe an operation for the table: 'all_reduce #41 in group "pair"', "recv from rank 3"."""
    group = graph.ranks[rank].get_group(operation)
    text = format_kind(operation)
    if operation.is_message:
        other = graph.get_global_rank(group, operation.peer)
        peer = operation.peer if other is None else other
        text += f" {format_peer(operation.kind, peer, operation.sequence)}"
    return text + _format_group(graph, rank, group)


def format_peer(kind: str, peer: int, tag: int) -> str:
    """Return the peer and the tag of a message: "to rank 3 tag 7"; negative for any rank."""
    end = "any rank" if peer < 0 else f"rank {peer}"
    return f"{'to' if kind == 'send' else 'from'} {end}" + (f" tag {tag}" if tag else "")


def _format_group(graph: WaitForGraph, rank: int, group: Group | None) -> str:
    """Return the name of a group if it is ambiguous without it, else "".

    A group is ambiguous if it has some ranks only, or if another group of the rank has its size.
    """
    sizes = [group.size for group in graph.ranks[rank].groups]
    if group is None or (group.size == len(graph.ranks) and sizes.count(group.size) == 1):
        return ""
    return f' in group "{escape(group.name, 40)}"'
