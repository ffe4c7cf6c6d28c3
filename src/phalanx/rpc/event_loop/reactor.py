"""The event loop of the leading thread: messages, deadlines, and wake-ups by other threads."""

from __future__ import annotations

import heapq
import logging
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from phalanx.rpc.event_loop.eventfd import EventFd
from phalanx.rpc.event_loop.leader_followers import LeaderFollowers
from phalanx.rpc.event_loop.spin import SpinPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Reactor"]

_LOG = logging.getLogger("phalanx.rpc")
_JOIN_SECONDS = 2.0
_SPIN_SECONDS = 500e-6
"""Seconds that the leader spins before it sleeps."""
_MAX_STALE = 64


class Reactor:
    """An event loop that calls handlers of readable descriptors and executes queued work.

    A handler only reads. It queues what it reads as work, which may take long or block; another
    thread then takes over the lead (`LeaderFollowers`).

    Args:
        on_expired: Called with the worker's id and the number of a call whose deadline has passed.
        is_pending: Returns whether that call still waits for its answer.
        on_wake: Called by the leader each time it is woken; returns work, or None.
    """

    def __init__(
        self,
        on_expired: Callable[[int, int], None],
        is_pending: Callable[[int, int], bool],
        on_wake: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._on_expired, self._is_pending, self._on_wake = on_expired, is_pending, on_wake
        self.is_stopped = False
        self._eventfd = EventFd()
        self._epoll = select.epoll()
        self._events: list[tuple[int, int]] = []
        self._spin = SpinPolicy(_SPIN_SECONDS)
        self._handlers: dict[int, Callable[[], None]] = {}
        self._work: deque[Callable[[], None]] = deque()
        self._deadlines: list[tuple[float, int, int]] = []
        self._lock = threading.Lock()
        """Guards the deadlines."""
        self.threads = LeaderFollowers(self._next_work)
        self.watch(self._eventfd.fd, self._handle_wake)

    def start(self) -> None:
        """Start the threads."""
        self.threads.start()

    def stop(self) -> None:
        """Stop all threads but those that execute something."""
        self.is_stopped = True
        self._eventfd.notify()
        self.threads.stop(_JOIN_SECONDS)

    def close(self) -> None:
        """Close the descriptors, after `stop`."""
        self._epoll.close()
        self._eventfd.close()

    def wake(self) -> None:
        """Make the leader look for new work."""
        if not self.is_stopped:
            self._eventfd.notify()

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Call a handler whenever a descriptor is readable."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor."""
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def submit(self, *work: Callable[[], None]) -> None:
        """Queue work for the leader, from a handler or from any thread.

        A thread that executes work may have lost the lead to a thread that polls already, which
        must then be woken.
        """
        self._work.extend(work)
        if not self.threads.is_leader:
            self.wake()

    def add_deadline(self, end: float, peer: int, call: int) -> None:
        """Add the deadline of a call, in monotonic seconds."""
        with self._lock:
            if len(self._deadlines) > _MAX_STALE:
                self._drop_stale_deadlines()
            heapq.heappush(self._deadlines, (end, peer, call))
            is_first = self._deadlines[0][2] == call
        if is_first and not self.threads.is_leader:
            self.wake()

    def _drop_stale_deadlines(self) -> None:
        """Drop the deadlines of ended calls, if their number has reached a power of two."""
        heap = self._deadlines
        if len(heap) & (len(heap) - 1) == 0:
            heap[:] = [each for each in heap if self._is_pending(each[1], each[2])]
            heapq.heapify(heap)

    def _next_work(self) -> Callable[[], None] | None:
        while not self.is_stopped:
            if self._work:
                return self._work.popleft()
            for fd, _ in self._wait_for_events():
                if (handler := self._handlers.get(fd)) is not None:
                    _call_handler(handler)
            self._expire()
        return None

    def _wait_for_events(self) -> list[tuple[int, int]]:
        """Wait until descriptors are readable or a deadline passes; return the events."""
        if not self._spin.wait(self._poll_once):
            start = time.perf_counter()
            self._events = self._epoll.poll(self._poll_timeout())
            self._spin.record_sleep(time.perf_counter() - start)
        return self._events

    def _poll_once(self) -> bool:
        self._events = self._epoll.poll(0)
        return bool(self._events)

    def _handle_wake(self) -> None:
        self._eventfd.clear()
        if (work := self._on_wake()) is not None:
            self._work.append(work)

    def _poll_timeout(self) -> float | None:
        with self._lock:
            if not self._deadlines:
                return None
            return max(0.0, self._deadlines[0][0] - time.monotonic()) + 1e-3

    def _expire(self) -> None:
        if not self._deadlines:
            return
        now, due = time.monotonic(), []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                due.append(heapq.heappop(self._deadlines))
        for _, peer, call in due:
            self._on_expired(peer, call)


def _call_handler(handler: Callable[[], None]) -> None:
    """Call a handler and log any exception, so that the leader continues."""
    try:
        handler()
    except Exception:  # noqa: BLE001 - it is logged
        _LOG.exception("a connection of RPC")
