"""Tells other workers that nothing here depends any more on what they have sent."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Releases"]

# Seconds to wait for more before a message goes out.
_GATHER = 0.01


class Releases:
    """Gathers what is released, and has it told by a thread of its own.

    Graphs end wherever the last reference goes, in the collector of garbage too: nothing may be
    locked or sent there.

    Args:
        tell: Sends a peer numbers of messages of its; may block, and raises nothing.
    """

    def __init__(self, tell: Callable[[int, list[int]], None]) -> None:
        self._tell = tell
        self._queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._caught = _Caught()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, peer: int, number: int) -> None:
        """Nothing depends any more on a message of a peer."""
        if self._caught.messages is None:
            self._queue.put((peer, number))
        else:
            self._caught.messages.append((peer, number))

    def start(self) -> None:
        """Have a thread that tells; called before there is anything to tell of."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="phalanx-rpc-releases", daemon=True
                    )
                    self._thread.start()

    def close(self) -> None:
        """Tell no more; blocks until the thread has ended."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def caught(self, peer: int, numbers: list[int]) -> Iterator[None]:
        """Put what this thread releases of one peer into a list, that goes there anyway."""
        messages: list[tuple[int, int]] = []
        self._caught.messages = messages
        try:
            yield
        finally:
            self._caught.messages = None
            for to, number in messages:
                if to == peer:
                    numbers.append(number)
                else:
                    self._queue.put((to, number))

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            by_peer: defaultdict[int, list[int]] = defaultdict(list)
            one: tuple[int, int] | None = first
            while one is not None:
                by_peer[one[0]].append(one[1])
                try:
                    one = self._queue.get(timeout=_GATHER)
                except queue.Empty:
                    break
            for peer, numbers in by_peer.items():
                self._tell(peer, numbers)
            if one is None:
                return


class _Caught(threading.local):
    messages: list[tuple[int, int]] | None = None
