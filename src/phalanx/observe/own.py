"""How long this process has waited for other ranks, from its own black box."""

from __future__ import annotations

import os

from phalanx.observe import recording
from phalanx.observe.boxes import read_box
from phalanx.observe.model import Operation
from phalanx.observe.shares import wait

__all__ = ["waited"]

# Those of some hundred steps; reading a box of so many takes about a millisecond.
_HISTORY = 1024


def waited(since: int, now: int) -> float | None:
    """Return for which part of the time from `since` to `now` something waited for another rank.

    It is what `phalanx watch` shows. A moment in which several operations wait counts once. Of more
    operations than a thousand the newest count, and the part is that of their time.

    Args:
        since: Monotonic nanoseconds.
        now: The same, later than that.

    Returns:
        From 0 to 1; None where this process has no black box that can be read.
    """
    job = recording.own_directory()
    if job is None or now <= since:
        return None
    try:
        box = read_box(job, f"{os.getpid()}.box", _HISTORY)
    except (OSError, ValueError):  # removed by somebody: training goes on
        return None
    done = [Operation(**operation) for operation in box["done"]]
    if len(done) == _HISTORY:
        since = max(since, done[0].end)
    spans = sorted(wait(operation, now) for operation in done)
    total, last = 0, since
    for begin, end in spans:
        total += max(0, min(end, now) - max(begin, last))
        last = max(last, end)
    return total / max(now - since, 1)
