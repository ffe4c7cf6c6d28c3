"""A transfer whose end is announced by a thread of the transport."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from phalanx.transports.interface import Transfer, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Announced"]


class Announced(Transfer):
    """A transfer that ends when `end` is called.

    Args:
        data: The caller's buffer.
        later: Schedules a function in a thread of the transport.
    """

    def __init__(self, data: memoryview, later: Callable[[Callable[[], None]], None]) -> None:
        self.data = data
        self._later = later
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: TransportError | None = None
        self._call: Callable[[], None] | None = None

    def end(self, error: TransportError | None = None) -> None:
        """End the transfer; calls after the first do nothing.

        Args:
            error: The error with which the transfer fails, or None on success.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
            call, self._call = self._call, None
        if call is not None:
            self._later(call)

    def wait(self, seconds: float) -> bool:  # noqa: D102 - documented in `interface.py`
        if not self._ended.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def then(self, call: Callable[[], None]) -> None:  # noqa: D102
        with self._lock:
            if not self._ended.is_set():
                self._call = call
                return
        self._later(call)
