"""Contexts as in `torch.distributed.autograd`, which separate the passes of one worker."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import UsageError
from phalanx.rpc.autograd.gradients import Root

__all__ = ["Contexts"]

_WORKER_SHIFT = 48
"""The position of the worker's id in a context's number, which makes it unique, as in PyTorch."""


class Contexts:
    """The open contexts of this worker; each thread is in one of them, or in none (0)."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._latest = worker << _WORKER_SHIFT
        self._numbers = itertools.count(self._latest + 1)
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self._thread = _Thread()

    @property
    def root(self) -> Root:
        """The root of backward passes that begin in this thread."""
        return self.root_of(self._thread.number)

    def root_of(self, number: int) -> Root:
        """Return the root of the passes in any worker's context; 0: this worker, no context."""
        return Root(number >> _WORKER_SHIFT if number else self._worker, number)

    def is_open(self, number: int) -> bool:
        """Return whether this worker has a context of this number open."""
        with self._lock:
            return number in self._open

    @property
    def oldest_context(self) -> int:
        """The lowest number of an open context, or if none is open that of the next one."""
        with self._lock:
            return min(self._open, default=self._latest + 1)

    @contextmanager
    def open(self) -> Iterator[int]:
        """Open a new context and enter it; yields its number.

        Raises:
            UsageError: This thread is already in a context.
        """
        if self._thread.number:
            raise UsageError(
                f"Already have an autograd context id for this thread: {self._thread.number}; "
                "contexts cannot be nested"
            )
        with self._lock:
            self._latest = number = next(self._numbers)
            self._open.add(number)
        try:
            with self.enter(number):
                yield number
        finally:
            with self._lock:
                self._open.discard(number)

    @contextmanager
    def enter(self, number: int) -> Iterator[None]:
        """Make this thread's backward passes part of a context."""
        saved, self._thread.number = self._thread.number, number
        try:
            yield
        finally:
            self._thread.number = saved


class _Thread(threading.local):
    number = 0
