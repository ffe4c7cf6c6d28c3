"""What engines do when the process ends: after its groups have left, whoever was loaded first.

Threads that are inside of a library must come back before: one that comes back to an interpreter
that ends, before Python 3.14, ends the process with "terminate called".

Groups leave in a function of `atexit`, which calls the last that was registered first. This module
is below them, so what it registers runs after theirs.
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
"""Seconds that the end of a process waits for calls that threads have not come back from."""
_calls: list[Callable[[], None]] = []


class _Inside:
    """How many threads are inside of a library."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = threading.Condition()


_inside = _Inside()


def at_the_end(call: Callable[[], None]) -> None:
    """Have something called at the end of this process, when its groups need no engine more."""
    _calls.append(call)


@contextlib.contextmanager
def inside_a_library() -> Iterator[None]:
    """For a daemon thread, around what may take long: the end of the process waits for it."""
    with _inside.changed:
        _inside.count += 1
    try:
        yield
    finally:
        with _inside.changed:
            _inside.count -= 1
            _inside.changed.notify_all()


def _in_child() -> None:
    _inside.__init__()  # type: ignore[misc] # those threads are the parent's


os.register_at_fork(after_in_child=_in_child)


@atexit.register
def _end() -> None:
    for call in _calls:
        call()
    with _inside.changed:
        _inside.changed.wait_for(lambda: not _inside.count, _LONGEST)
