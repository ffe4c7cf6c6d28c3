"""Whom a rank waited for, and for how long.

A black box has the length of a collective's waits together and the peer waited for longest, not
where in the operation they were: they are taken to be at the beginning, where ranks meet. A message
is waited for until it is done, so its wait is at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.observe.culprit.waits import group_of

if TYPE_CHECKING:
    from phalanx.observe.culprit.endings import End
    from phalanx.observe.model import Job, Operation, Rank

__all__ = ["Members", "covered", "in_job", "members", "over", "time_waited", "wait"]

Members = Mapping[tuple[int, int], int]
"""Ranks of the job by the identity of a group and the number in it."""


def members(job: Job) -> Members:
    """Find out which rank of the job is which in every group.

    A group may have had too many members to note: then its ranks' own numbers in it tell.
    """
    known: dict[tuple[int, int], int] = {}
    for rank in job.ranks:
        for group in rank.groups:
            known.update({(group.identity, i): other for i, other in enumerate(group.members)})
    for rank in job.ranks:
        known.update({(group.identity, group.rank): rank.rank for group in rank.groups})
    return known


def covered(rank: Rank, since: int) -> int:
    """From when on all of a rank's operations are known, not earlier than `since`."""
    begin = max(since, rank.opened)
    if rank.history and rank.operations > len(rank.history) + len(rank.open):
        begin = max(begin, rank.history[0].end)
    return begin


def over(end: End) -> bool:
    """Whether a rank that ended so does nothing any more."""
    return end.how not in ("alive", "left", "elsewhere")


def time_waited(rank: Rank, known: Members, begin: int, now: int) -> dict[int, int]:
    """Nanoseconds from `begin` to `now` in which something waited, by the rank waited for.

    A moment in which several operations wait counts once, for the one that waits longest.
    """
    waits = []
    for operation in (*rank.history, *rank.open):
        start, end = wait(operation, now)
        if end > max(start, begin):
            waits.append((start, end, in_job(rank, operation, operation.waiting_for, known)))
    found: dict[int, int] = {}
    for start, end, who in sorted(waits):
        length = end - max(start, begin)
        if length > 0:
            found[who] = found.get(who, 0) + length
            begin = end
    return found


def wait(operation: Operation, now: int) -> tuple[int, int]:
    """When an operation, looked at `now`, waited; never, where the two times are alike.

    Of a message that is being waited for it isn't known since when: it counts from its beginning.
    """
    begin = operation.begin
    end = min(operation.end or now, now)
    if not operation.end and operation.waiting_for >= 0:
        return begin, max(begin, end)
    length = max(min(operation.waited, end - begin), 0)
    return (end - length, end) if operation.is_message else (begin, begin + length)


def in_job(rank: Rank, operation: Operation, number: int, known: Members) -> int:
    """Which rank of the job has a number in the group of an operation; -1 if it isn't known."""
    group = group_of(rank, operation)
    return -1 if group is None or number < 0 else known.get((group.identity, number), -1)
