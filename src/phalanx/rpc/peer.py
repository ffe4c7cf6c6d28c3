"""Another worker, as this one sees it."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from phalanx.errors import PeerLost
from phalanx.rpc import door, near
from phalanx.rpc.wake import Wake

if TYPE_CHECKING:
    import torch

    from phalanx.rpc.far import Far, Line, Outbox
    from phalanx.rpc.workers import Card, WorkerInfo

__all__ = ["Peer", "Pending"]

_MOMENT_MILLISECONDS = 1_000
_LAST_WORDS_MILLISECONDS = 200


@dataclass
class Pending:
    """A call that has no answer yet.

    Attributes:
        future: What waits for it.
        root: On whose behalf it was made.
        what: The call, for messages.
        kept: What must live until then.
        grad: Whether its thread recorded what gradients need.
        end: When its time is over, in monotonic seconds.
    """

    future: torch.futures.Future[Any]
    root: int
    what: str
    kept: object
    grad: bool
    end: float


def _opened(card: Card) -> int:
    try:
        return os.pidfd_open(card.pid)
    except ProcessLookupError:
        return os.eventfd(1)  # which can be read from the beginning


class Peer:
    """How to reach a worker, and what is under way to it; the worker may be this one.

    Args:
        info: Its name and id.
        card: What it tells of itself.
        is_near: Whether it shares this host.
        same_main: Whether it runs the same main program.
        address: Where it listens.
    """

    def __init__(
        self, info: WorkerInfo, card: Card, is_near: bool, same_main: bool, address: str
    ) -> None:
        self.info, self.card, self.id = info, card, info.id
        self.is_near, self.same_main, self.address = is_near, same_main, address
        self.nonce = bytes.fromhex(card.nonce)
        self.lost = ""
        """Why it is; empty if it isn't."""
        self.has_left = False
        """Whether it has said that it leaves: so there was a way to it."""
        self._wake = Wake()
        self.process = _opened(card) if is_near else -1
        """What can be read once it is dead, if it is on this host."""
        self.pending: dict[int, Pending] = {}
        self.lock = threading.Lock()
        self.outbox: near.Stream | Outbox | None = None
        self._lines: deque[near.Stream | Line] = deque()
        self._streams: WeakSet[near.Stream] = WeakSet()
        self._streams_lock = threading.Lock()
        self._closed = False

    def __str__(self) -> str:
        return f"worker {self.info.name!r} (id {self.id}, {self.card.process})"

    def check(self) -> None:
        """Raise PeerLost if it is lost."""
        if self.lost:
            raise PeerLost(self.lost)

    def lose(self, words: str) -> str:
        """It is lost; returns the words for it, of which the first count."""
        self.lost = self.lost or words
        self._wake.up()
        self._end_streams()
        return self.lost

    @property
    def has_died(self) -> bool:
        """Whether it is on this host, and dead."""
        return self.is_near and near.is_readable(self.process)

    def is_gone(self) -> bool:
        """Whether it is known to be lost, or is dead."""
        return bool(self.lost) or self.has_died

    def died_now(self) -> bool:
        """Whether it is dead, or in the next moment: of what it leaves its memory goes first."""
        return self.is_near and near.is_readable(self.process, _LAST_WORDS_MILLISECONDS)

    def how_lost(self) -> str:
        """After a connection to it has ended: why that was. May block for a moment."""
        poll = select.poll()
        # If it has left it has said so, and that may still be on its way.
        poll.register(self._wake.descriptor, select.POLLIN)
        if not self.is_near:
            poll.poll(_LAST_WORDS_MILLISECONDS)
            words = "is lost: it has died, or there is no way to it any more"
            return self.lost or f"{self} {words}"
        # A process's connections end a moment before it does.
        poll.register(self.process, select.POLLIN)
        poll.poll(_MOMENT_MILLISECONDS)
        if self.has_died and not self.lost:
            poll.unregister(self.process)
            poll.poll(_LAST_WORDS_MILLISECONDS)
        return self.lost or f"{self} has {'died' if self.has_died else 'left RPC'}"

    def line(self, key: bytes, far: Far | None, end: float, most: float) -> near.Stream | Line:
        """A line that nobody else uses, until it is given back; as `door.connect` says.

        Raises:
            OSError: The worker doesn't listen any more.
            PhalanxError: It can't be connected to; `CallTimeout` where it takes beyond `end`.
        """
        try:
            return self._lines.pop()
        except IndexError:
            pass
        if far is None or self.is_near:
            stream = door.connect(key, self.address, end, most)
            with self._streams_lock:
                self._streams.add(stream)
            return stream
        from phalanx.rpc.far import Line

        return Line(far, self.address, self._wake.descriptor)

    def give_back(self, line: near.Stream | Line) -> None:
        """Let others use it."""
        if self._closed:
            line.close()
        else:
            self._lines.append(line)

    def _end_streams(self) -> None:
        """Nobody waits any longer: what a dead worker has forked may still hold its ends."""
        with self._streams_lock:
            streams = list(self._streams)
        if isinstance(self.outbox, near.Stream):
            streams.append(self.outbox)
        for stream in streams:
            stream.end()

    def close(self) -> None:
        """Close everything, but for lines in use: those end, and close when they are given back."""
        self._closed = True
        self._end_streams()
        if self.outbox is not None:
            self.outbox.close()
        while self._lines:
            self._lines.pop().close()
        if self.process >= 0:
            os.close(self.process)
