"""Announcement of a fatal exception: recorded in the flight recorder, and sent to peers at once.

Python needs some tenths of a second to exit after an uncaught exception. Peers that wait for this
rank need not wait that long: callbacks registered with `on_failure` notify them.
"""

from __future__ import annotations

import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

from phalanx import _native
from phalanx.observe.escape import encodable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

SESSION_ENDED = "its session ended with "
"""Prefix of a group's abort reason if an exception left the rank's `with phalanx.init()`."""

CAUSED_BY = " (caused by "
"""Separator between an exception and its cause in the text that `format_exception` returns."""

_MAX_CAUSES = 16
_WORKER_EXIT_SECONDS = 0.2

_callbacks: list[Callable[[], None]] = []
_installed = False


def on_failure(call: Callable[[], None]) -> None:
    """Register a function to call when an exception ends this process; it must not raise."""
    _callbacks.append(call)


def announce(error: BaseException) -> None:
    """Announce that `error` ends this process or the function that it was started for."""
    try:
        text = format_exception(error)
    except RuntimeError as interruption:  # from a signal handler, as DataLoader's of SIGCHLD
        text = encodable(f"{_format_line(error)}{CAUSED_BY}{_format_line(interruption)})")
    try:
        _native.record_ending("failed", text)
    finally:  # peers must be notified in any case
        for call in _callbacks:
            call()


def format_exception(error: BaseException) -> str:
    """Return an exception's type and message in one line, with its root cause if any.

    A DataLoader worker that was killed counts as the cause of a failed connection to it.
    """
    text, cause = _format_line(error), error
    for _ in range(_MAX_CAUSES):
        if cause.__cause__ is None:
            break
        cause = cause.__cause__
    if cause is not error:
        text += f"{CAUSED_BY}{_format_line(cause)})"
    elif lost := _describe_lost_worker(error):
        text += f"{CAUSED_BY}{lost})"
    return encodable(text)


def _describe_lost_worker(error: BaseException) -> str:
    """Name the killed DataLoader worker that made a connection fail, or return "".

    PyTorch names the worker only if its SIGCHLD handler runs before the connection is used. Waits a
    fraction of a second for the worker to exit, since a process closes its connections first.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_loading = any(frame.filename.endswith("torch/utils/data/dataloader.py") for frame in frames)
    if not is_loading or not isinstance(error, (ConnectionError, EOFError)):
        return ""
    from multiprocessing import connection, process

    children: Any = process._children.copy()  # type: ignore[attr-defined]
    ended = connection.wait([child.sentinel for child in children], _WORKER_EXIT_SECONDS)
    for child in children:
        if child.sentinel not in ended:
            continue
        child.join(_WORKER_EXIT_SECONDS)
        if (child.exitcode or 0) < 0:
            name = signal.strsignal(-child.exitcode)
            return f"DataLoader worker (pid {child.pid}) is killed by signal: {name}."
    return ""


def _format_line(error: BaseException) -> str:
    lines = traceback.format_exception_only(type(error), error)
    # Lines that begin with a space are the location of a SyntaxError; notes follow the message.
    text = next((line for line in lines if not line.startswith(" ")), "").strip()
    return text.partition("\n")[0]


def is_interactive() -> bool:
    """Return whether this process outlives its uncaught exceptions."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def install() -> None:
    """Announce every uncaught exception from now on; a second call does nothing.

    Exceptions in an interactive session are not announced, since the process outlives them.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not is_interactive():
            announce(error)
        before(kind, error, trace)

    sys.excepthook = hook
