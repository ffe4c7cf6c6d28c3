"""The time that a rank spent waiting for each other rank.

For a collective, a flight recorder has the total length of its waits and the peer waited for
longest, but not their position within the operation. They are assumed to be at the beginning, where
the ranks synchronize. The wait for a message lasts until the message is complete, so it is at the
end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.observe.job_directory import get_recorder_name
from phalanx.observe.model import Operation, get_group
from phalanx.observe.recorder_reader import read_recorder

if TYPE_CHECKING:
    from phalanx.observe.diagnosis.exit_reasons import ExitStatus
    from phalanx.observe.model import Job, Rank

__all__ = [
    "GroupRanks",
    "find_covered_begin",
    "get_global_rank",
    "get_wait_interval",
    "is_inactive",
    "map_group_ranks",
    "measure_wait_share",
    "measure_wait_time",
]

# Covers some hundred steps; reading this many operations takes about a millisecond.
_HISTORY = 1024

GroupRanks = Mapping[tuple[int, int], int]
"""Ranks in the job, by the identity of a group and the rank's number in it."""


def map_group_ranks(job: Job) -> GroupRanks:
    """Return the mapping from the members of every group to ranks of the job.

    If a group had too many members to record, the ranks' own numbers in it are used.
    """
    group_ranks: dict[tuple[int, int], int] = {}
    for rank in job.ranks:
        for group in rank.groups:
            group_ranks.update(
                {(group.identity, i): other for i, other in enumerate(group.members)}
            )
    for rank in job.ranks:
        group_ranks.update({(group.identity, group.rank): rank.rank for group in rank.groups})
    return group_ranks


def find_covered_begin(rank: Rank, since: int) -> int:
    """Return the time from which on all operations of a rank are known, but not before `since`."""
    begin = max(since, rank.opened)
    if rank.history and rank.operations > len(rank.history) + len(rank.open):
        begin = max(begin, rank.history[0].end)
    return begin


def is_inactive(status: ExitStatus) -> bool:
    """Return whether a rank with this end is inactive."""
    return status.reason not in ("alive", "left", "other_host")


def measure_wait_time(rank: Rank, group_ranks: GroupRanks, begin: int, now: int) -> dict[int, int]:
    """Return the nanoseconds spent waiting from `begin` to `now`, by the rank waited for.

    Simultaneous waits count once, for the wait that began first.
    """
    waits = []
    for operation in (*rank.history, *rank.open):
        start, end = get_wait_interval(operation, now)
        if end > max(start, begin):
            waits.append(
                (start, end, get_global_rank(rank, operation, operation.waiting_for, group_ranks))
            )
    found: dict[int, int] = {}
    for start, end, peer in sorted(waits):
        length = end - max(start, begin)
        if length > 0:
            found[peer] = found.get(peer, 0) + length
            begin = end
    return found


def measure_wait_share(since: int, now: int) -> float | None:
    """Return the share of the time from `since` to `now` in which an operation waited for a rank.

    The value is the one that `phalanx watch` shows. Simultaneous waits count once. Only the newest
    1024 operations count; if there are more, the share refers to the time since the first of them.

    Args:
        since: Begin, in monotonic nanoseconds.
        now: End, in monotonic nanoseconds, later than `since`.

    Returns:
        The share, from 0 to 1; None if this process has no readable flight recorder or `now` is not
        later than `since`.
    """
    # Imported here because it imports torch: `phalanx watch` must respond at once.
    from phalanx.observe import recorder

    job = recorder.get_job_directory()
    if job is None or now <= since:
        return None
    try:
        content = read_recorder(job, get_recorder_name(os.getpid()), _HISTORY)
    except (OSError, ValueError):  # removed; training must continue
        return None
    done = [Operation(**operation) for operation in content["done"]]
    if len(done) == _HISTORY:
        since = max(since, done[0].end)
    spans = sorted(get_wait_interval(operation, now) for operation in done)
    total, last = 0, since
    for begin, end in spans:
        total += max(0, min(end, now) - max(begin, last))
        last = max(last, end)
    return total / max(now - since, 1)


def get_wait_interval(operation: Operation, now: int) -> tuple[int, int]:
    """Return begin and end of an operation's wait, as of `now`; they are equal if it did not wait.

    A wait that is under way counts from the beginning of its operation, since its own is unknown.
    """
    begin = operation.begin
    end = min(operation.end or now, now)
    if not operation.end and operation.waiting_for >= 0:
        return begin, max(begin, end)
    length = max(min(operation.waited, end - begin), 0)
    return (end - length, end) if operation.is_message else (begin, begin + length)


def get_global_rank(rank: Rank, operation: Operation, number: int, group_ranks: GroupRanks) -> int:
    """Return the rank in the job with a number in an operation's group; -1 if unknown."""
    group = get_group(rank, operation)
    return -1 if group is None or number < 0 else group_ranks.get((group.identity, number), -1)
