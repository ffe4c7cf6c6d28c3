"""Shutdown of transports at the end of the process, after its groups have left.

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["at_the_end", "inside_a_library"]

_LONGEST = 10.0
"""Most seconds that the end of the process waits for threads inside a library."""
_calls: list[Callable[[], None]] = []


class _Inside:
    """The number of threads inside a library."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = threading.Condition()


_inside = _Inside()


def at_the_end(call: Callable[[], None]) -> None:
    """Register a function to call at the end of this process, after its groups have left."""
    _calls.append(call)


@contextlib.contextmanager
def inside_a_library() -> Iterator[None]:
    """Make the end of the process wait for the enclosed call of a daemon thread."""
    with _inside.changed:
        _inside.count += 1
    try:
        yield
    finally:
        with _inside.changed:
            _inside.count -= 1
            _inside.changed.notify_all()


def _in_child() -> None:
    _inside.__init__()  # type: ignore[misc] # a child process has none of the parent's threads


os.register_at_fork(after_in_child=_in_child)


@atexit.register
def _end() -> None:
    for call in _calls:
        call()
    with _inside.changed:
        _inside.changed.wait_for(lambda: not _inside.count, _LONGEST)
