"""Hooks that shut down transports at the end of the process, after its groups have left.

Threads inside a library must return before the interpreter ends: before Python 3.14, a thread that
returns to an ending interpreter terminates the process with "terminate called".

Groups leave in an `atexit` function, and `atexit` calls the last registered function first. This
module must be imported before that function is registered, so that its own function runs later.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator

_MAX_SECONDS = 10.0
"""The longest time that the end of the process waits for threads inside a library, in seconds."""
_hooks: list[Callable[[], None]] = []
_wait_hooks: list[Callable[[], None]] = []


class _LibraryCalls:
    """The number of threads inside a library."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = threading.Condition()


_library_calls = _LibraryCalls()


def register_shutdown_hook(hook: Callable[[], None]) -> None:
    """Register a function to call at the end of this process, after its groups have left."""
    _hooks.append(hook)


def register_wait_hook(hook: Callable[[], None]) -> None:
    """Register a function to call before a shutdown hook waits long for other processes.

    They may wait for this one to end meanwhile, and have to learn otherwise that it does no more.
    """
    _wait_hooks.append(hook)


def prepare_long_wait() -> None:
    """Call the registered functions; for a shutdown hook that waits long for other processes."""
    for hook in _wait_hooks:
        hook()


@contextlib.contextmanager
def delay_shutdown() -> Iterator[None]:
    """Make the end of the process wait for the enclosed call of a daemon thread."""
    with _library_calls.changed:
        _library_calls.count += 1
    try:
        yield
    finally:
        with _library_calls.changed:
            _library_calls.count -= 1
            _library_calls.changed.notify_all()


def _reset_in_child() -> None:
    _library_calls.__init__()  # type: ignore[misc] # a child process has none of the parent's threads


os.register_at_fork(after_in_child=_reset_in_child)


@atexit.register
def _run_hooks() -> None:
    for hook in _hooks:
        hook()
    with _library_calls.changed:
        _library_calls.changed.wait_for(lambda: not _library_calls.count, _MAX_SECONDS)
