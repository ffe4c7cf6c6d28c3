"""Looking for a message for a moment before sleeping: waking up costs more than a short call."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Spin"]

_MOST_MISSES = 3


class Spin:
    """Looks again and again, and gives way to others in between; gives up where it seldom pays.

    After three waits that took longer than it may look, it looks only once, until a wait was short
    enough again. On a single core it never looks twice.

    Args:
        seconds: How long it may look.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._misses = 0

    def look(self, found: Callable[[], bool]) -> bool:
        """Whether something was found, by a function that looks once and doesn't block."""
        if found():
            return True
        if self._misses >= _MOST_MISSES:
            return False
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            os.sched_yield()
            if found():
                self._misses = 0
                return True
        return False

    def slept(self, seconds: float) -> None:
        """It wasn't found; it came after so many seconds of sleep."""
        total = seconds + (self._seconds if self._misses < _MOST_MISSES else 0.0)
        self._misses = 0 if total < self._seconds else self._misses + 1
