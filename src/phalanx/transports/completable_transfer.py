"""A transfer that a thread of the transport completes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from phalanx.transports.interface import Transfer, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CompletableTransfer"]


class CompletableTransfer(Transfer):
    """A transfer that completes when `complete` is called.

    Args:
        data: The caller's buffer.
        schedule: Schedules a function in a thread of the transport.
    """

    def __init__(self, data: memoryview, schedule: Callable[[Callable[[], None]], None]) -> None:
        self.data = data
        self._schedule = schedule
        self._lock = threading.Lock()
        self._completed = threading.Event()
        self._error: TransportError | None = None
        self._callback: Callable[[], None] | None = None

    def complete(self, error: TransportError | None = None) -> None:
        """Complete the transfer; calls after the first do nothing.

        Args:
            error: The error with which the transfer fails, or None on success.
        """
        with self._lock:
            if self._completed.is_set():
                return
            self._error = error
            self._completed.set()
            callback, self._callback = self._callback, None
        if callback is not None:
            self._schedule(callback)

    def wait(self, timeout: float) -> bool:  # noqa: D102 - documented in `interface.py`
        if not self._completed.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True

    def add_done_callback(self, callback: Callable[[], None]) -> None:  # noqa: D102
        with self._lock:
            if not self._completed.is_set():
                self._callback = callback
                return
        self._schedule(callback)
