"""Preemption by SIGTERM: finish the step, save a checkpoint, exit."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from phalanx.system.processes import ExitCode

PREEMPTION_EXIT_CODE = ExitCode.TERMINATED
"""The exit code of a rank that saved and exited on SIGTERM: 143, by the convention of shells."""

Value = TypeVar("Value")

_log = logging.getLogger("phalanx")


class _Interrupted(BaseException):  # like KeyboardInterrupt: `except Exception` must not catch it
    """Raised if SIGTERM arrives during a wait."""


class PreemptionHandler:
    """A context manager in which SIGTERM only sets `requested`.

    Exit restores the previous handler.
    """

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False
        self._previous_handler: object = None

    def __enter__(self) -> PreemptionHandler:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._handle_signal)
        else:
            _log.warning(
                "phalanx: training does not run in the main thread, so SIGTERM cannot be handled: "
                "it ends the process without a checkpoint"
            )
        return self

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signal's API
        self.requested = True
        if self._waiting:
            self._waiting = False
            raise _Interrupted

    def run_interruptible(self, action: Callable[[], Value]) -> Value | None:
        """Run an action and return its result, or None if SIGTERM has arrived or arrives meanwhile.

        SIGTERM interrupts the action at an arbitrary point. The objects that the action uses must
        not be used afterwards.
        """
        try:
            try:
                self._waiting = True
                return None if self.requested else action()
            finally:
                self._waiting = False
        except _Interrupted:
            return None

    def __exit__(self, *_: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)  # type: ignore[arg-type] # a saved handler
