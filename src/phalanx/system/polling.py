"""Polling with back-off.

A blocking wait of a store cannot be interrupted by Ctrl-C and blocks every other thread's access
to the store, so keys are polled instead.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["attempts", "wait_until"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


def attempts(end: float = math.inf, *, longest: float = _LONGEST_PAUSE) -> Iterator[None]:
    """Yield at once, and again after pauses that double from 0.5 ms on, until the deadline.

    Args:
        end: The deadline, in seconds on the monotonic clock. The last attempt is at or after it.
        longest: The longest pause, in seconds.
    """
    pause = _FIRST_PAUSE
    while True:
        last = time.monotonic() >= end
        yield
        if last:
            return
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(2 * pause, longest)


def wait_until(
    condition: Callable[[], object], seconds: float, *, longest: float = _LONGEST_PAUSE
) -> bool:
    """Poll a condition until it is true; return False if it is not within `seconds`."""
    end = time.monotonic() + seconds
    return any(condition() for _ in attempts(end, longest=longest))
