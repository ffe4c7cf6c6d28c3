"""The root worker of a thread: the one that made the outermost call which the thread executes."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["get_root_worker", "set_root_worker"]


class _ThreadLocal(threading.local):
    root: int | None = None


_thread_local = _ThreadLocal()


def get_root_worker() -> int | None:
    """Return the id of the worker on whose behalf this thread works; None if it is this worker."""
    return _thread_local.root


@contextmanager
def set_root_worker(root: int) -> Iterator[None]:
    """Make this thread work on behalf of the worker `root` within the context."""
    saved, _thread_local.root = _thread_local.root, root
    try:
        yield
    finally:
        _thread_local.root = saved
