"""The time that a rank spent waiting for each other rank.

For a collective, a flight recorder has the total length of its waits and the peer waited for
longest, but not their position within the operation. They are assumed to be at the beginning, where
the ranks synchronize. The wait for a message lasts until the message is complete, so it is at the
end.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from phalanx.diagnosis.model import Operation
from phalanx.recorder.job_directory import get_recorder_name
from phalanx.recorder.recorder_file import read_recorder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.diagnosis.model import Job, Rank

# Covers some hundred steps; reading this many operations takes about a millisecond.
_HISTORY = 1024


def find_covered_begin(rank: Rank, since: int) -> int:
    """Return the time from which on all operations of a rank are known, but not before `since`."""
    begin = max(since, rank.opened)
    if rank.history and rank.operations > len(rank.records):
        begin = max(begin, rank.history[0].end)
    return begin


def measure_wait_time(job: Job, rank: Rank, begin: int) -> dict[int, int]:
    """Return the nanoseconds spent waiting from `begin` to `job.now`, by the rank waited for."""
    waits = []
    for operation in rank.records:
        start, end = get_wait_interval(operation, job.now)
        if end > max(start, begin):  # the other ones need no look-up
            waits.append((start, end, job.find_rank(rank, operation, operation.waiting_for)))
    return _measure_waits(waits, begin)


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
    from phalanx.recorder import flight_recorder

    job = flight_recorder.get_job_directory()
    if job is None or now <= since:
        return None
    try:
        content = read_recorder(job, get_recorder_name(os.getpid()), _HISTORY)
    except (OSError, ValueError):  # removed; training must continue
        return None
    done = [Operation(**operation) for operation in content["done"]]
    if len(done) == _HISTORY:
        since = max(since, done[0].end)
    waits = ((*get_wait_interval(operation, now), -1) for operation in done)
    return sum(_measure_waits(waits, since).values()) / max(now - since, 1)


def _measure_waits(waits: Iterable[tuple[int, int, int]], begin: int) -> dict[int, int]:
    """Return the nanoseconds of waits after `begin`, by the rank waited for.

    Simultaneous waits count once, for the wait that began first.

    Args:
        waits: The begin and the end of each wait, and the rank waited for.
        begin: The time before which waits do not count.
    """
    found: dict[int, int] = {}
    for start, end, peer in sorted(waits):
        length = end - max(start, begin)
        if length > 0:
            found[peer] = found.get(peer, 0) + length
            begin = end
    return found


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
