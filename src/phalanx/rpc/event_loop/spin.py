"""Spinning for a message before sleeping, since waking up costs more than a short call."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SpinPolicy"]

_MAX_MISSES = 3


class SpinPolicy:
    """A poll loop that yields to other threads in between and adapts to the length of waits.

    After three waits that were longer than it may spin, it polls only once, until a wait was short
    enough again. On a single core it never polls twice.

    Args:
        seconds: The maximum time to spin, in seconds.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._misses = 0

    def wait(self, poll: Callable[[], bool]) -> bool:
        """Return whether `poll`, which polls once and does not block, returned true in time."""
        if poll():
            return True
        if self._misses >= _MAX_MISSES:
            return False
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            os.sched_yield()
            if poll():
                self._misses = 0
                return True
        return False

    def record_sleep(self, seconds: float) -> None:
        """Record that spinning failed and a sleep of that many seconds followed."""
        total = seconds + (self._seconds if self._misses < _MAX_MISSES else 0.0)
        self._misses = 0 if total < self._seconds else self._misses + 1
