"""A transfer whose end an engine announces, which hears of it in a thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from phalanx.engines.interface import EngineError, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Announced"]


class Announced(Transfer):
    """Ends when `end` is called; only the first time counts.

    Args:
        data: The caller's bytes.
        later: Has something called soon, in a thread of the engine.
    """

    def __init__(self, data: memoryview, later: Callable[[Callable[[], None]], None]) -> None:
        self.data = data
        self._later = later
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: EngineError | None = None
        self._call: Callable[[], None] | None = None

    def end(self, error: EngineError | None = None) -> None:
        """It is over; with an error, if it can't be done."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
            call, self._call = self._call, None
        if call is not None:
            self._later(call)

    def wait(self, seconds: float) -> bool:  # noqa: D102 - `interface.py` does
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
