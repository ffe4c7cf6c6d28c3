"""A send or a receive over MPI, as its callers see it."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from phalanx.transports.completable_transfer import CompletableTransfer
from phalanx.transports.interface import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallbackThread", "MpiTransfer"]


class CallbackThread:
    """A thread for the callbacks of transfers, which may block there."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, callback: Callable[[], None]) -> None:
        """Call a function in the thread, after all functions submitted before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="phalanx-mpi-callbacks", daemon=True
                )
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


class MpiTransfer(CompletableTransfer):
    """A transfer to or from a rank under a tag, which the MPI thread completes."""

    def __init__(self, data: memoryview, peer: int, tag: int, callbacks: CallbackThread) -> None:
        super().__init__(data, callbacks.submit)
        self.peer, self.tag = peer, tag

    def finish(self, reason: str = "") -> None:
        """Complete the transfer; it fails if there is a reason."""
        self.complete(TransportError(self.peer, reason) if reason else None)
