"""SIGTERM: the step is finished, a snapshot saved, and the process leaves."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

__all__ = ["STOPPED", "Stop"]

STOPPED = 128 + signal.SIGTERM
"""The exit code of a rank that has saved and left because of SIGTERM: 143, as shells count."""

Value = TypeVar("Value")

_log = logging.getLogger("phalanx")


class _Interrupted(BaseException):  # as KeyboardInterrupt: what catches exceptions lets it through
    """SIGTERM has come while something was waited for."""


class Stop:
    """A context in which SIGTERM only sets `asked`; the handler from before comes back after it."""

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False
        self._before: object = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
        else:
            _log.warning(
                "phalanx: training runs in another than the main thread, where SIGTERM can't be "
                "heard: it ends the process without a snapshot"
            )
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signal's own
        self.asked = True
        if self._waiting:
            self._waiting = False
            raise _Interrupted

    def unless_asked(self, action: Callable[[], Value]) -> Value | None:
        """Return what an action returns; None once SIGTERM has come, which breaks it off.

        Where SIGTERM breaks it off is anywhere in it: what it uses is of no more use then.
        """
        try:
            try:
                self._waiting = True
                return None if self.asked else action()
            finally:
                self._waiting = False
        except _Interrupted:
            return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type] # what it returned
