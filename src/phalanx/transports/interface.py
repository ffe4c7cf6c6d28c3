"""The interface that a transport implements.

A transport carries bytes between the ranks of one group whose ranks are on several hosts. It has
tagged sends and receives, a way to abort them, and an end. Collectives, the matching of messages
and the reports of failures are built on top of this interface, the same for all transports.

Transports share the classes at the end: `CompletableTransfer` is a transfer that a thread of the
transport completes, `CallbackThread` a thread for the callbacks of transfers, and `TagQueues` has
the receives or messages that wait for their match.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Generic, TypeVar

T = TypeVar("T")


class TransportError(Exception):
    """A transfer cannot be carried out: its peer is gone, or the transport was aborted.

    Attributes:
        peer: The rank that is gone: the transfer's peer, or a rank through which the connection to
            the peer leads; -1 if unknown.
    """

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Transfer(ABC):
    """A posted send or receive.

    The transfer owns its buffer until it has completed. A send has completed when its buffer may be
    used again, a receive when its buffer holds the data. Both may also complete with an error.
    """

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Block until the transfer has completed, and return whether it has.

        If this returns False, the transfer continues and may be waited for again.

        Args:
            timeout: The longest time to wait, in seconds; 0 to test without blocking.

        Raises:
            TransportError: The transfer has failed. Every later wait raises the same error.
        """

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call a function once, soon after the transfer has completed or failed.

        The transport calls it in one of its own threads.
        """


class Transport(ABC):
    """One rank's end of a transport between the ranks of a group.

    Sends and receives with the same tag between the same two ranks match in the order in which
    they are posted. Transfers with different tags do not wait for each other. A receive must have
    exactly the size of its send, at least one byte. All methods are thread-safe.
    """

    @abstractmethod
    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        """Post a send of contiguous bytes; return at once.

        Args:
            data: The bytes to send, which must not change until the transfer has completed.
            peer: A rank of the group.
            tag: From 0 to 2^31 - 1.

        Raises:
            TransportError: The peer is known to be gone, or the transport was aborted.
        """

    @abstractmethod
    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        """Post a receive into contiguous writable bytes; return at once.

        Args:
            data: The buffer for the bytes, of the same size as the send.
            peer: A rank of the group.
            tag: From 0 to 2^31 - 1.

        Raises:
            TransportError: The peer is known to be gone, or the transport was aborted.
        """

    def has_ended(self, peer: int) -> bool:  # noqa: ARG002 - of transports that know it
        """Return whether a peer is known to have left for good, or died; never block.

        It may be asked also after `abort`. A peer that has only aborted has not ended.
        """
        return False

    @abstractmethod
    def abort(self) -> None:
        """Fail all pending transfers with `TransportError`, here and soon on their peers."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; data that were already sent still reach the peers."""


class CompletableTransfer(Transfer):
    """A transfer that completes when `complete` is called.

    Args:
        schedule: Schedules a function in a thread of the transport.
    """

    def __init__(self, schedule: Callable[[Callable[[], None]], None]) -> None:
        self._schedule = schedule
        self._lock = threading.Lock()
        self._completed = threading.Event()
        self._error: TransportError | None = None
        self._callback: Callable[[], None] | None = None

    def complete(self, error: TransportError | None = None) -> None:
        """Complete the transfer; calls after the first do nothing.

        Args:
            error: The error with which the transfer fails, or None on success.
        """
        if (callback := self._finish(error)) is not None:
            self._schedule(callback)

    def _finish(self, error: TransportError | None) -> Callable[[], None] | None:
        """Complete the transfer; return the callback to call, if any."""
        with self._lock:
            if self._completed.is_set():
                return None
            self._error = error
            self._completed.set()
            callback, self._callback = self._callback, None
            return callback

    def wait(self, timeout: float) -> bool:  # noqa: D102 - documented in `Transfer`
        if not self._completed.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True

    def add_done_callback(self, callback: Callable[[], None]) -> None:  # noqa: D102
        with self._lock:
            if not self._completed.is_set():
                self._callback = callback
                return
        self._schedule(callback)


class CallbackThread:
    """A thread for the callbacks of transfers, which may block there; started by the first one.

    Args:
        name: The name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, callback: Callable[[], None]) -> None:
        """Call a function in the thread, after all functions submitted before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(callback)

    def stop(self, seconds: float) -> None:
        """End the thread after all callbacks; wait for that, for up to `seconds`."""
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        while (callback := self._queue.get()) is not None:
            callback()
            del callback


class TagQueues(Generic[T]):
    """Posted receives or unexpected messages by tag, each in the order of arrival."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[T]] = {}

    def append(self, tag: int, item: T) -> None:
        """Add an item with a tag."""
        self._queues.setdefault(tag, deque()).append(item)

    def pop_oldest(self, tag: int) -> T | None:
        """Remove and return the oldest item with this tag; None if there is none."""
        items = self._queues.get(tag)
        if not items:
            return None
        item = items.popleft()
        if not items:
            del self._queues[tag]
        return item

    def keep_while(self, condition: Callable[[T], bool]) -> None:
        """Remove the first item of each tag that does not meet a condition, and all after it.

        They could only be taken in place of that item.
        """
        for tag, items in self._queues.items():
            self._queues[tag] = deque(takewhile(condition, items))

    def remove_all(self) -> list[T]:
        """Remove and return all items."""
        removed = [item for items in self._queues.values() for item in items]
        self._queues.clear()
        return removed
