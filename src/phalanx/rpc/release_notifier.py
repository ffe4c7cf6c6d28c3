"""Notifications of other workers about ended references and unmapped blocks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from phalanx.errors import PhalanxError
from phalanx.rpc.owned_values import RefCountDelta

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.rpc.codec.message import TensorDescriptor
    from phalanx.rpc.peer import Peer

__all__ = ["ReleaseNotifier"]

_LOG = logging.getLogger("phalanx.rpc")
_RETRY_SECONDS = 0.5

Blocks = list[tuple[int, int]]
"""Pairs of a segment's number and a block's number."""


class ReleaseNotifier:
    """A queue of notifications, each of which is retried until it can be sent.

    Notifications may be queued anywhere, even in a garbage collection, so they are sent later.

    Args:
        wake: Makes a thread call `take_work`, and the function that it returns.
        send_ref_count: Reports ended references to the owner of a value.
        free_blocks: Tells a worker that blocks of its memory are free.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        send_ref_count: Callable[[int, RefCountDelta], None],
        free_blocks: Callable[[int, Blocks], None],
    ) -> None:
        self._wake, self._send_ref_count, self._free_blocks = (
            wake,
            send_ref_count,
            free_blocks,
        )
        self._queue: deque[tuple[int, RefCountDelta | Blocks]] = deque()

    def queue_release(self, owner: int, delta: RefCountDelta) -> None:
        """Queue a notification that references to a value of `owner` have ended."""
        self._queue.append((owner, delta))
        self._wake()

    def queue_unmapped(self, peer: Peer, descriptors: list[TensorDescriptor]) -> None:
        """Queue a notification to the owner of blocks that this worker could not map them."""
        self._queue.append(
            (peer.id, [(descriptor.segment, descriptor.block) for descriptor in descriptors])
        )
        self._wake()

    def take_work(self) -> Callable[[], None] | None:
        """Return a function that sends the queued notifications; None if there are none.

        The function may block: another thread can take over the lead from the thread that runs it.
        """
        return self._send if self._queue else None

    def _send(self) -> None:
        while self._queue:
            try:
                worker, release = self._queue.popleft()
            except IndexError:  # another thread was first
                return
            try:
                if isinstance(release, RefCountDelta):
                    self._send_ref_count(worker, release)
                else:
                    self._free_blocks(worker, release)
            except PhalanxError as error:
                _LOG.warning("worker %d could not be notified of releases yet: %s", worker, error)
                self._queue.appendleft((worker, release))
                timer = threading.Timer(_RETRY_SECONDS, self._wake)
                timer.daemon = True
                timer.start()
                return
