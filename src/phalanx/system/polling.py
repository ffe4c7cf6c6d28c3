"""Polling with back-off, and a descriptor by which one thread wakes another that polls.

A blocking wait of a store cannot be interrupted by Ctrl-C and blocks every other thread's access
to the store, so keys are polled instead.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class EventFd:
    """An eventfd to poll, by which one thread wakes another."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._descriptor

    def notify(self) -> None:
        """Wake the polling thread, now or when it polls next."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Discard all wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; no thread may wake the other any more."""
        os.close(self._descriptor)
