"""Contexts as in `torch.distributed.autograd`: backward passes of one worker, kept apart."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import UsageError
from phalanx.rpc.autograd.gradients import Root

__all__ = ["Contexts"]

_WORKER_SHIFT = 48
"""Numbers are unique among workers, as in PyTorch: one that is passed on means the same there."""


class Contexts:
    """The contexts of this worker that are open; a thread is in one, or in none (0)."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._latest = worker << _WORKER_SHIFT
        self._numbers = itertools.count(self._latest + 1)
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self._thread = _Thread()

    @property
    def current(self) -> int:
        """That of this thread."""
        return self._thread.number

    def root(self, number: int) -> Root:
        """Whose the gradients of a context are: of this worker, or of the one that opened it.

        Raises:
            UsageError: It is one of this worker's, and isn't open.
        """
        if not number:
            return Root(self._worker)
        worker = number >> _WORKER_SHIFT
        with self._lock:
            is_there = number in self._open or (worker >= 0 and worker != self._worker)
        if not is_there:
            raise UsageError(
                f"context_id={number!r}: expected what `with context() as context_id` gave, within "
                "that block"
            )
        return Root(worker, number)

    @property
    def oldest(self) -> int:
        """No context of a lower number is open."""
        with self._lock:
            return min(self._open, default=self._latest + 1)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A new one."""
        with self._lock:
            self._latest = number = next(self._numbers)
            self._open.add(number)
        try:
            with self.entered(number):
                yield number
        finally:
            with self._lock:
                self._open.discard(number)

    @contextmanager
    def entered(self, number: int) -> Iterator[None]:
        """This thread's backward passes belong to this one."""
        before, self._thread.number = self._thread.number, number
        try:
            yield
        finally:
            self._thread.number = before


class _Thread(threading.local):
    number = 0
