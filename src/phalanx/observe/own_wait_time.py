"""The time that this process has spent waiting for other ranks, from its own flight recorder."""

from __future__ import annotations

import os

from phalanx.observe import recorder
from phalanx.observe.job_directory import get_recorder_name
from phalanx.observe.model import Operation
from phalanx.observe.recorder_reader import read_recorder
from phalanx.observe.wait_time import get_wait_interval

__all__ = ["measure_wait_share"]

# Covers some hundred steps; reading this many operations takes about a millisecond.
_HISTORY = 1024


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
