"""The threads that execute what others ask for: a leader and those who follow.

The leader waits for messages and does itself what they ask: no other thread stands between. When
that takes longer than a millisecond, or waits for a call of its own, the thread that stands by
becomes the leader, and the old one, once it is done, stands by or is put away for later use. So
there are as many threads as there are requests that take long, and no nesting of calls can block.

What wakes the one that stands by is a timer of the kernel, which the leader sets before each piece
of work and which nobody needs to stop: that costs a microsecond, and no switch of threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Crew"]

_LOG = logging.getLogger("phalanx.rpc")
_PATIENCE = 1_000_000
"""Nanoseconds of work after which another thread takes over the lead."""
_AT_ONCE = 1
_MONOTONIC, _NONBLOCK_CLOEXEC = 1, os.O_CLOEXEC
_TIME = struct.Struct("qqqq")


class _Timer:
    """A timerfd; `os` has it from Python 3.13 on."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = libc.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self.descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd_create: {os.strerror(number)}")
        # Not by way of CDLL: letting others run around a call this short costs more than the call.
        self._settime = ctypes.PyDLL(None).timerfd_settime
        self._patience = _TIME.pack(0, 0, 0, _PATIENCE)
        self._at_once = _TIME.pack(0, 0, 0, _AT_ONCE)

    def start(self) -> None:
        self._settime(self.descriptor, 0, self._patience, None)

    def fire(self) -> None:
        self._settime(self.descriptor, 0, self._at_once, None)

    def wait(self) -> None:
        os.read(self.descriptor, 8)

    def close(self) -> None:
        os.close(self.descriptor)


class Crew:
    """Threads that take turns to lead.

    Args:
        wait: Waits for the next piece of work and returns it; None when all is over. Only one
            thread at a time is in it.
    """

    def __init__(self, wait: Callable[[], Callable[[], None] | None]) -> None:
        self._wait = wait
        self._timer = _Timer()
        self._lock = threading.Lock()
        self._leader = 0
        self._busy = self._over = False
        self._spare = threading.Semaphore(0)
        self._spares = 0
        self._threads: list[threading.Thread] = []
        self._executing: set[int] = set()

    def start(self) -> None:
        """Start the first two."""
        with self._lock:
            self._spawn(leads=True)
            self._spawn(leads=False)

    def hand_over(self) -> None:
        """Called before this thread waits: if it leads, another one does from now on."""
        if self._leader == threading.get_ident() and self._busy:
            self._timer.fire()

    @property
    def leads(self) -> bool:
        """Whether this thread is the leader."""
        return self._leader == threading.get_ident()

    @property
    def at_work(self) -> int:
        """How many threads execute something."""
        return len(self._executing)

    def stop(self, seconds: float) -> None:
        """End them, but for those that execute something; `wait` must return None from now on."""
        with self._lock:
            self._over = True
            self._spare.release(self._spares + 1)
            threads = list(self._threads)
        self._timer.fire()
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident not in self._executing:
                thread.join(seconds)
        if not any(thread.is_alive() for thread in threads):
            self._timer.close()

    def _spawn(self, leads: bool) -> None:
        thread = threading.Thread(target=self._run, args=(leads,), name="phalanx-rpc", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _run(self, leads: bool) -> None:
        if leads:
            self._leader = threading.get_ident()
        while leads or self._stand_by():
            if not self._lead() or not self._wait_as_spare():
                return
            leads = False

    def _lead(self) -> bool:
        """Lead; returns True when another thread does, False when all is over."""
        me = threading.get_ident()
        while (work := self._wait()) is not None:
            self._busy = True
            self._timer.start()
            self._executing.add(me)
            try:
                work()
            except Exception:  # noqa: BLE001 - this thread mustn't be lost, whatever is
                _LOG.exception("worker of RPC")
            finally:
                del work
                self._executing.discard(me)
                with self._lock:
                    leads = self._leader == me
                    if leads:
                        self._busy = False
            if not leads:
                return True
        return False

    def _wait_as_spare(self) -> bool:
        with self._lock:
            if self._over:
                return False
            self._spares += 1
        self._spare.acquire()
        return not self._over

    def _stand_by(self) -> bool:
        """Wait until the leader has worked for too long, and become it; False when all is over."""
        while True:
            self._timer.wait()
            with self._lock:
                if self._over:
                    return False
                if not self._busy:
                    continue
                self._leader, self._busy = threading.get_ident(), False
                if self._spares:
                    self._spares -= 1
                    self._spare.release()
                else:
                    self._spawn(leads=False)
                return True
