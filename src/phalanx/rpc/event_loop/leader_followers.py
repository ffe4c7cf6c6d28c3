"""The threads that execute requests: a leader and its followers.

The leader waits for messages and executes the requests in them itself, so no other thread stands
between. When a request takes longer than a millisecond, or waits for a call of its own, a follower
becomes the leader. Once it is done, the old leader becomes an idle thread for later use. So
there are as many threads as there are long requests, and nested calls never block one another.

A kernel timer wakes the follower. The leader sets it before each piece of work, and nobody
needs to stop it: this costs a microsecond, and no switch of threads.
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

__all__ = ["LeaderFollowers"]

_LOG = logging.getLogger("phalanx.rpc")
_MAX_LEADER_WORK = 1_000_000
"""Nanoseconds of work after which another thread takes over the lead."""
_IMMEDIATELY = 1
_MONOTONIC, _NONBLOCK_CLOEXEC = 1, os.O_CLOEXEC
_TIME = struct.Struct("qqqq")


class _Timer:
    """A timerfd; `os` provides it only from Python 3.13 on."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = libc.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd_create: {os.strerror(number)}")
        # PyDLL, not CDLL: releasing the GIL for a call this short costs more than the call.
        self._settime = ctypes.PyDLL(None).timerfd_settime
        self._delayed = _TIME.pack(0, 0, 0, _MAX_LEADER_WORK)
        self._immediate = _TIME.pack(0, 0, 0, _IMMEDIATELY)

    def start(self) -> None:
        self._settime(self.fd, 0, self._delayed, None)

    def fire(self) -> None:
        self._settime(self.fd, 0, self._immediate, None)

    def wait(self) -> None:
        os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)


class LeaderFollowers:
    """Threads that take turns as the leader.

    Args:
        wait: Waits for the next piece of work and returns it, or None at the end. Only one thread
            at a time calls it.
    """

    def __init__(self, wait: Callable[[], Callable[[], None] | None]) -> None:
        self._wait = wait
        self._timer = _Timer()
        self._lock = threading.Lock()
        self._leader = 0
        self._is_busy = self._is_stopped = False
        self._idle = threading.Semaphore(0)
        self._idle_count = 0
        self._threads: list[threading.Thread] = []
        self._executing: set[int] = set()

    def start(self) -> None:
        """Start the first two threads: the leader and a follower."""
        with self._lock:
            self._start_thread(is_leader=True)
            self._start_thread(is_leader=False)

    def promote_follower(self) -> None:
        """Pass on the lead if this thread has it; called before this thread waits."""
        if self._leader == threading.get_ident() and self._is_busy:
            self._timer.fire()

    @property
    def is_leader(self) -> bool:
        """True if this thread is the leader."""
        return self._leader == threading.get_ident()

    @property
    def active_count(self) -> int:
        """The number of threads that execute something."""
        return len(self._executing)

    def stop(self, seconds: float) -> None:
        """Stop all threads that execute nothing; from now on `wait` must return None."""
        with self._lock:
            self._is_stopped = True
            self._idle.release(self._idle_count + 1)
            threads = list(self._threads)
        self._timer.fire()
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident not in self._executing:
                thread.join(seconds)
        if not any(thread.is_alive() for thread in threads):
            self._timer.close()

    def _start_thread(self, is_leader: bool) -> None:
        thread = threading.Thread(
            target=self._run, args=(is_leader,), name="phalanx-rpc", daemon=True
        )
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _run(self, is_leader: bool) -> None:
        if is_leader:
            self._leader = threading.get_ident()
        while is_leader or self._wait_to_lead():
            if not self._lead() or not self._wait_idle():
                return
            is_leader = False

    def _lead(self) -> bool:
        """Lead; return True when another thread has taken the lead, False at the end."""
        me = threading.get_ident()
        while (work := self._wait()) is not None:
            self._is_busy = True
            self._timer.start()
            self._executing.add(me)
            try:
                work()
            except Exception:  # noqa: BLE001 - the thread must survive
                _LOG.exception("worker of RPC")
            finally:
                del work
                self._executing.discard(me)
                with self._lock:
                    is_leader = self._leader == me
                    if is_leader:
                        self._is_busy = False
            if not is_leader:
                return True
        return False

    def _wait_idle(self) -> bool:
        with self._lock:
            if self._is_stopped:
                return False
            self._idle_count += 1
        self._idle.acquire()
        return not self._is_stopped

    def _wait_to_lead(self) -> bool:
        """Wait until the leader works for too long, and take the lead; return False at the end."""
        while True:
            self._timer.wait()
            with self._lock:
                if self._is_stopped:
                    return False
                if not self._is_busy:
                    continue
                self._leader, self._is_busy = threading.get_ident(), False
                if self._idle_count:
                    self._idle_count -= 1
                    self._idle.release()
                else:
                    self._start_thread(is_leader=False)
                return True
