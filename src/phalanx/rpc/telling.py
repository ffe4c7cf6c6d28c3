"""Telling other workers what they may free: references that ended here, blocks without room."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from phalanx.errors import PhalanxError
from phalanx.rpc.values import Change

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.rpc.peer import Peer
    from phalanx.rpc.wire import Row

__all__ = ["Telling"]

_LOG = logging.getLogger("phalanx.rpc")
_AGAIN_SECONDS = 0.5

Blocks = list[tuple[int, int]]
"""Segments and their blocks."""


class Telling:
    """What is to be told, again and again until there is a way to.

    It may be noted anywhere, in a garbage collection too: so nothing is sent there and then.

    Args:
        wake: Has a thread call `work`, and what that returns.
        count: Tells the owner of a value of references that came or went.
        give_back: Tells a worker that blocks of its are free.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        count: Callable[[int, Change], None],
        give_back: Callable[[int, Blocks], None],
    ) -> None:
        self._wake, self._count, self._give_back = wake, count, give_back
        self._left: deque[tuple[int, Change | Blocks]] = deque()

    def ended(self, owner: int, change: Change) -> None:
        """References to a value of `owner` have ended."""
        self._left.append((owner, change))
        self._wake()

    def unmapped(self, peer: Peer, rows: list[Row]) -> None:
        """Who leased blocks to this worker must hear that it couldn't map them."""
        self._left.append((peer.id, [(row.segment, row.block) for row in rows]))
        self._wake()

    def work(self) -> Callable[[], None] | None:
        """What there is to be done. It may block: another thread can take over from who does it."""
        return self._tell if self._left else None

    def _tell(self) -> None:
        while self._left:
            try:
                whom, what = self._left.popleft()
            except IndexError:  # another thread was first
                return
            try:
                if isinstance(what, Change):
                    self._count(whom, what)
                else:
                    self._give_back(whom, what)
            except PhalanxError as error:
                _LOG.warning("worker %d isn't told yet what it may free: %s", whom, error)
                self._left.appendleft((whom, what))
                later = threading.Timer(_AGAIN_SECONDS, self._wake)
                later.daemon = True
                later.start()
                return
