"""A send or a receive over MPI, for its callers."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from phalanx.transports.completable_transfer import Announced
from phalanx.transports.interface import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Calls", "MpiTransfer"]


class Calls:
    """A thread for the callbacks of transfers, which may block there."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], None]) -> None:
        """Call a function in the thread, after all functions put before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="phalanx-mpi-calls", daemon=True
                )
                self._thread.start()
        self._calls.put(call)

    def stop(self, seconds: float) -> None:
        """End the thread after all calls; wait for that, for up to `seconds`."""
        self._calls.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class MpiTransfer(Announced):
    """A transfer to or from a rank under a tag, which the thread of MPI ends."""

    def __init__(self, data: memoryview, peer: int, tag: int, calls: Calls) -> None:
        super().__init__(data, calls.put)
        self.peer, self.tag = peer, tag

    def finish(self, reason: str = "") -> None:
        """End the transfer; it fails if there is a reason."""
        self.end(TransportError(self.peer, reason) if reason else None)
