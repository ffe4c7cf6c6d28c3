"""Notifications to other workers that nothing here depends on their messages any more."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Releases"]

# Seconds to wait for further releases before a batch is sent.
_BATCH_SECONDS = 0.01


class Releases:
    """A collector of released messages, whose thread notifies the senders in batches.

    A graph is freed wherever its last reference is dropped, even in the garbage collector, where
    no lock may be taken and nothing may be sent.

    Args:
        send: A function that sends a peer the numbers of its released messages. It may block and
            must not raise.
    """

    def __init__(self, send: Callable[[int, list[int]], None]) -> None:
        self._send = send
        self._queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._captured = _Captured()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, peer: int, number: int) -> None:
        """Record that nothing depends any more on a message of a peer."""
        if self._captured.messages is None:
            self._queue.put((peer, number))
        else:
            self._captured.messages.append((peer, number))

    def start(self) -> None:
        """Start the thread, once; called before the first release can occur."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="phalanx-rpc-releases", daemon=True
                    )
                    self._thread.start()

    def close(self) -> None:
        """Stop sending notifications; block until the thread has ended."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def capture(self, peer: int, numbers: list[int]) -> Iterator[None]:
        """Collect this thread's releases of a peer's messages in `numbers`, to go with a reply.

        Releases for other peers are queued on exit.
        """
        messages: list[tuple[int, int]] = []
        self._captured.messages = messages
        try:
            yield
        finally:
            self._captured.messages = None
            for to, number in messages:
                if to == peer:
                    numbers.append(number)
                else:
                    self._queue.put((to, number))

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            by_peer: defaultdict[int, list[int]] = defaultdict(list)
            release: tuple[int, int] | None = first
            while release is not None:
                by_peer[release[0]].append(release[1])
                try:
                    release = self._queue.get(timeout=_BATCH_SECONDS)
                except queue.Empty:
                    break
            for peer, numbers in by_peer.items():
                self._send(peer, numbers)
            if release is None:
                return


class _Captured(threading.local):
    messages: list[tuple[int, int]] | None = None
