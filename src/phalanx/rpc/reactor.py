"""What the leading thread waits for: messages, deadlines, and others that wake it."""

from __future__ import annotations

import heapq
import logging
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from phalanx.rpc.crew import Crew
from phalanx.rpc.spin import Spin
from phalanx.rpc.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Reactor"]

_LOG = logging.getLogger("phalanx.rpc")
_JOIN_SECONDS = 2.0
_LOOK = 500e-6
"""Seconds that the leader looks for more before it sleeps."""
_MOST_STALE = 64


class Reactor:
    """Calls a handler when its descriptor can be read, and does what handlers leave to be done.

    A handler only reads. What it reads is work that may take long or block: another thread then
    takes over the lead (`Crew`).

    Args:
        expired: Called with worker and number of a call whose deadline has come.
        is_pending: Whether that call still waits for its answer.
        woken: Called by the leader each time it was woken; what it returns is work.
    """

    def __init__(
        self,
        expired: Callable[[int, int], None],
        is_pending: Callable[[int, int], bool],
        woken: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._expired, self._is_pending, self._on_wake = expired, is_pending, woken
        self.over = False
        self._wake = Wake()
        self._epoll = select.epoll()
        self._found: list[tuple[int, int]] = []
        self._spin = Spin(_LOOK)
        self._sources: dict[int, Callable[[], None]] = {}
        self._work: deque[Callable[[], None]] = deque()
        self._deadlines: list[tuple[float, int, int]] = []
        self._lock = threading.Lock()
        """Guards the deadlines."""
        self.crew = Crew(self._next)
        self.watch(self._wake.descriptor, self._woken)

    def start(self) -> None:
        """Begin."""
        self.crew.start()

    def stop(self) -> None:
        """End the threads, but for those that execute something."""
        self.over = True
        self._wake.up()
        self.crew.stop(_JOIN_SECONDS)

    def close(self) -> None:
        """Let go of everything, after `stop`."""
        self._epoll.close()
        self._wake.close()

    def wake(self) -> None:
        """Have the leader look for what is new."""
        if not self.over:
            self._wake.up()

    def watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Call a function whenever a descriptor can be read."""
        self._sources[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Call it no longer."""
        del self._sources[descriptor]
        self._epoll.unregister(descriptor)

    def do(self, *work: Callable[[], None]) -> None:
        """Have the leader do something next: from handlers, and from any thread.

        One that executes may have lost the lead meanwhile, to one that polls already.
        """
        self._work.extend(work)
        if not self.crew.leads:
            self.wake()

    def expect(self, end: float, peer: int, call: int) -> None:
        """Say when a call's time is over, in monotonic seconds."""
        with self._lock:
            if len(self._deadlines) > _MOST_STALE:
                self._forget_ended()
            heapq.heappush(self._deadlines, (end, peer, call))
            is_first = self._deadlines[0][2] == call
        if is_first and not self.crew.leads:
            self.wake()

    def _forget_ended(self) -> None:
        """Drop deadlines of calls that are over; all are looked at once they have doubled."""
        heap = self._deadlines
        if len(heap) & (len(heap) - 1) == 0:
            heap[:] = [each for each in heap if self._is_pending(each[1], each[2])]
            heapq.heapify(heap)

    def _next(self) -> Callable[[], None] | None:
        while not self.over:
            if self._work:
                return self._work.popleft()
            for descriptor, _ in self._ready():
                if (handler := self._sources.get(descriptor)) is not None:
                    _guarded(handler)
            self._expire()
        return None

    def _ready(self) -> list[tuple[int, int]]:
        """Wait for something to be read."""
        if not self._spin.look(self._look):
            slept = time.perf_counter()
            self._found = self._epoll.poll(self._patience())
            self._spin.slept(time.perf_counter() - slept)
        return self._found

    def _look(self) -> bool:
        self._found = self._epoll.poll(0)
        return bool(self._found)

    def _woken(self) -> None:
        self._wake.clear()
        if (work := self._on_wake()) is not None:
            self._work.append(work)

    def _patience(self) -> float | None:
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
            self._expired(peer, call)


def _guarded(handler: Callable[[], None]) -> None:
    """Call a handler; whatever it raises, the leader goes on."""
    try:
        handler()
    except Exception:  # noqa: BLE001 - it is logged
        _LOG.exception("a connection of RPC")
