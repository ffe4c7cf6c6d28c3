"""A send or a receive over MPI, seen by who waits for it."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from phalanx.engines.announced import Announced
from phalanx.engines.interface import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Calls", "MpiTransfer"]


class Calls:
    """A thread for what is called at the end of transfers: it may take its time there."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], None]) -> None:
        """Have something called, after what was given before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="phalanx-mpi-calls", daemon=True
                )
                self._thread.start()
        self._calls.put(call)

    def stop(self, seconds: float) -> None:
        """End the thread when it has called all; wait so long for that."""
        self._calls.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class MpiTransfer(Announced):
    """Bytes for or from a rank, under a tag; the thread of MPI says when it has ended."""

    def __init__(self, data: memoryview, peer: int, tag: int, calls: Calls) -> None:
        super().__init__(data, calls.put)
        self.peer, self.tag = peer, tag

    def finish(self, reason: str = "") -> None:
        """It has ended: well, or for a reason."""
        self.end(EngineError(self.peer, reason) if reason else None)
