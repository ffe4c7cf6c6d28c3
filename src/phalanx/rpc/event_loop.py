"""The event loop of a worker, and the threads that execute requests: a leader and its followers.

The leader waits for messages and executes the requests in them itself, so no other thread stands
between. When a request takes longer than a millisecond, or waits for a call of its own, a follower
becomes the leader. Once it is done, the old leader becomes an idle thread for later use. So
there are as many threads as there are long requests, and nested calls never block one another.

A kernel timer wakes the follower. Setting it takes up to 10 us in a virtual machine, since it sets
the timer of the processor. So the leader sets it only if it is not set: at most once in a
millisecond, however many short requests there are. A follower that is woken early, because the work
in progress began later than the timer, sets it again for the rest.

Before a thread sleeps, it spins for a while, since waking up costs more than a short call.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from phalanx.system.polling import EventFd

_LOG = logging.getLogger("phalanx.rpc")
_JOIN_SECONDS = 2.0
_SPIN_SECONDS = 500e-6
"""Seconds that the leader spins before it sleeps."""
_MAX_STALE = 64
_MAX_MISSES = 3
_MAX_LEADER_WORK = 1_000_000
"""Nanoseconds of work after which another thread takes over the lead."""
_IMMEDIATELY = 1
_MONOTONIC, _NONBLOCK_CLOEXEC = 1, os.O_CLOEXEC
_TIME = struct.Struct("qqqq")


class SpinPolicy:
    """A poll loop that yields to other threads in between and adapts to the length of waits.

    After three waits that were longer than it may spin, it polls only once, until a wait was short
    enough again. On a single core it never polls twice.

    Args:
        seconds: The maximum time to spin, in seconds.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._misses = 0

    def wait(self, poll: Callable[[], bool]) -> bool:
        """Return whether `poll`, which polls once and does not block, returned true in time."""
        if poll():
            return True
        if self._misses >= _MAX_MISSES:
            return False
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            os.sched_yield()
            if poll():
                self._misses = 0
                return True
        return False

    def record_sleep(self, seconds: float) -> None:
        """Record that spinning failed and a sleep of that many seconds followed."""
        total = seconds + (self._seconds if self._misses < _MAX_MISSES else 0.0)
        self._misses = 0 if total < self._seconds else self._misses + 1


class Reactor:
    """An event loop that calls handlers of readable descriptors and executes queued work.

    A handler only reads. It queues what it reads as work, which may take long or block; another
    thread then takes over the lead (`LeaderFollowers`).

    Args:
        on_expired: Called with a call whose deadline has passed while it was pending.
        take_deferred: Returns further work, or None; the leader calls it before it waits.
    """

    def __init__(
        self,
        on_expired: Callable[[Any], None],
        take_deferred: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._on_expired, self._take_deferred = on_expired, take_deferred
        self._is_stopped = False
        self._eventfd = EventFd()
        self._epoll = select.epoll()
        self._events: list[tuple[int, int]] = []
        self._spin = SpinPolicy(_SPIN_SECONDS)
        self._handlers: dict[int, Callable[[], None]] = {}
        self._work: deque[Callable[[], None]] = deque()
        self._deadlines: list[tuple[float, int, dict[int, Any]]] = []
        """A heap of deadlines, each with a call's number and the pending calls it is one of."""
        self._lock = threading.Lock()
        """Guards the deadlines."""
        self.threads = LeaderFollowers(self._next_work)
        self.watch(self._eventfd.fileno(), self._eventfd.clear)

    def stop(self) -> None:
        """Stop all threads but those that execute something."""
        self._is_stopped = True
        self._eventfd.notify()
        self.threads.stop(_JOIN_SECONDS)

    def close(self) -> None:
        """Close the descriptors, after `stop`."""
        self._epoll.close()
        self._eventfd.close()

    def wake(self) -> None:
        """Make the leader look for new work, from any thread, even in a garbage collection.

        The leader itself looks for more once its present work is done.
        """
        if not (self.threads.is_working_leader or self._is_stopped):
            self._eventfd.notify()

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Call a handler whenever a descriptor is readable."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor, if it is watched."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def submit(self, *work: Callable[[], None]) -> None:
        """Queue work for the leader, from a handler or from any thread.

        A thread that executes work may have lost the lead to a thread that polls already, which
        must then be woken.
        """
        self._work.extend(work)
        if not self.threads.is_leader:
            self.wake()

    def add_deadline(self, end: float, call: int, pending: dict[int, Any]) -> None:
        """Add the deadline of a call.

        Args:
            end: The deadline, in monotonic seconds.
            call: The number of the call.
            pending: The pending calls by number; this one is removed when it expires.
        """
        with self._lock:
            heap = self._deadlines
            # Those of ended calls are dropped whenever the number of all is a power of two.
            if len(heap) > _MAX_STALE and len(heap) & (len(heap) - 1) == 0:
                heap[:] = [each for each in heap if each[1] in each[2]]
                heapq.heapify(heap)
            heapq.heappush(heap, (end, call, pending))
            is_first = heap[0][1] == call
        if is_first and not self.threads.is_leader:
            self.wake()

    def _next_work(self) -> Callable[[], None] | None:
        while not self._is_stopped:
            if self._work:
                return self._work.popleft()
            if (work := self._take_deferred()) is not None:
                return work
            for fd, _ in self._wait_for_events():
                if (handler := self._handlers.get(fd)) is not None:
                    try:
                        handler()
                    except Exception:  # noqa: BLE001 - it is logged, and the leader continues
                        _LOG.exception("a connection of RPC")
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
        for _, call, pending in due:
            if (expired := pending.pop(call, None)) is not None:
                self._on_expired(expired)


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

    def start(self, nanoseconds: int) -> None:
        self._settime(self.fd, 0, _TIME.pack(0, 0, 0, nanoseconds), None)

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
        self._is_timer_set = False
        self._busy_since = 0
        """The start of the leader's work, in monotonic nanoseconds."""
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
        if self.is_working_leader:
            self._busy_since = 0  # as if the work had taken too long already
            self._timer.start(_IMMEDIATELY)

    @property
    def is_leader(self) -> bool:
        """True if this thread is the leader."""
        return self._leader == threading.get_ident()

    @property
    def is_working_leader(self) -> bool:
        """True if this thread is the leader and executes work."""
        return self._is_busy and self._leader == threading.get_ident()

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
        self._timer.start(_IMMEDIATELY)
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
            self._busy_since = time.monotonic_ns()
            self._is_busy = True
            if not self._is_timer_set:
                self._is_timer_set = True
                self._timer.start(_MAX_LEADER_WORK)
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
            # Before the leader's state is read: if it begins to work now, it sets the timer.
            self._is_timer_set = False
            with self._lock:
                if self._is_stopped:
                    return False
                if self._is_busy and not self._set_timer_for_rest():
                    self._take_lead()
                    return True

    def _set_timer_for_rest(self) -> bool:
        """Set the timer for the rest of the leader's time; return False if there is none left."""
        rest = self._busy_since + _MAX_LEADER_WORK - time.monotonic_ns()
        if rest > 0:
            self._is_timer_set = True
            self._timer.start(rest)
        return rest > 0

    def _take_lead(self) -> None:
        self._leader, self._is_busy = threading.get_ident(), False
        if self._idle_count:
            self._idle_count -= 1
            self._idle.release()
        else:
            self._start_thread(is_leader=False)
