"""Matching of messages from other hosts with the recvs of this rank.

Every sender announces its messages to this rank in order, with envelopes. From the first recv on
that may match a sender, one receive for its next envelope is always posted. An envelope goes to
the oldest matching recv, which then receives the data. If there is no matching recv yet, the
envelope is kept and the data stay with the sender. A recv from any source is posted in memory too.
When an envelope matches such a recv, it is withdrawn from memory, unless a message of this host
has arrived first.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from phalanx.hierarchical import tags
from phalanx.hierarchical.fingerprint import Header
from phalanx.hierarchical.transfers import Gone, bytes_at
from phalanx.transports import Transfer, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx import _native
    from phalanx.hierarchical.messages import RemoteMessage
    from phalanx.topology import Layout
    from phalanx.transports import Transport

__all__ = ["Expected", "Inbox"]

_T = TypeVar("_T")

_LOOK = 0.0005
"""Seconds between two checks for a message of this host, while other hosts may send one too."""


class Expected(Transfer):
    """A posted recv; its underlying transfer is known when its message is announced.

    Args:
        message: The message that the user waits for.
        data: The address of the buffer.
        size: The size of the buffer in bytes.
        number: The position of the recv in the order of the posts; it only grows.
        forget: Called with the recv when a message of this host has matched it.
    """

    def __init__(
        self,
        message: RemoteMessage,
        data: int,
        size: int,
        number: int,
        forget: Callable[[Expected], None],
    ) -> None:
        self.message, self.number = message, number
        self._forget = forget
        self._data, self._size = data, size
        self._known = threading.Event()
        self._deciding = threading.Lock()
        self._transfer: Transfer | None = None
        self._error: TransportError | None = None
        self._group: _native.Group | None = None
        self._local: _native.Message | None = None
        self._ranks: tuple[int, ...] = ()

    def post_here(self, group: _native.Group, ranks: tuple[int, ...]) -> None:
        """Post the recv in this host's native group too."""
        its = self.message.own.fingerprint
        self._group, self._ranks = group, ranks
        self._local = group.irecv(self._data, its.count, its.dtype, -1, its.sequence)

    def claim(self, source: int) -> bool:
        """Match the recv with a message of another host; return whether that succeeded.

        It fails if a message of this host has arrived first.
        """
        with self._deciding:
            if self._local is not None and self._group is not None:
                if not self._group.withdraw(self._local, source):
                    return False
                self._local = None
            self.message.peer = source
        return True

    def ask(self, header: Header, transport: Transport) -> None:
        """Receive the announced data, if they match this recv."""
        self.message.match(header)
        if not self.message.done and self._size:
            data = bytes_at(self._data, self._size)
            self._transfer = transport.recv(data, self.message.peer, tags.of_data(header.number))
        self._known.set()

    def fail(self, error: TransportError) -> None:
        """Fail the recv: no message will match it."""
        self._error = error
        self._known.set()

    @property
    def idle(self) -> bool:
        """True if the transport has no transfer for this recv; after a failure it gets none."""
        return self._transfer is None

    def wait(self, seconds: float) -> bool:
        """Block until the data have arrived, from any host; return whether they have."""
        end = time.monotonic() + seconds
        while not self._known.is_set():
            if self._has_come():
                self._forget(self)
                return True
            left = max(0.0, end - time.monotonic())
            self._known.wait(min(left, _LOOK) if self._local is not None else left)
            if not left:
                break
        if not self._known.is_set():
            return False
        if self._error is not None:
            raise self._error
        return self._transfer is None or self._transfer.wait(max(0.0, end - time.monotonic()))

    def then(self, call: Callable[[], None]) -> None:
        """Raise `NotImplementedError`: callers only wait for messages."""
        raise NotImplementedError

    def _has_come(self) -> bool:
        """Return whether a message of this host has arrived."""
        with self._deciding:
            local, group = self._local, self._group
            if local is None or group is None or not (local.done or group.test(local)):
                return False
            if local.status is not None:
                raise TransportError(-1, "the group is broken")
            self.message.peer = self._ranks[local.peer]
        return True


class _Early(NamedTuple):
    """An envelope for which no matching recv is posted yet."""

    order: int
    source: int
    header: Header


class Inbox:
    """The recvs of a group that messages of other hosts may match.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        transport: The transport that carries bytes between hosts.
        lost: Called when the connection to a rank is closed; returns whether that is in order,
            see `Failing.lost`.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        transport: Transport,
        lost: Callable[[Gone], bool],
    ) -> None:
        self._native = native
        self._layout = layout
        self._transport = transport
        self._lost = lost
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._waiting: dict[tuple[int, int], deque[Expected]] = {}
        self._early: dict[tuple[int, int], deque[_Early]] = {}
        self._senders: set[int] = set()
        self._gone: dict[int, TransportError] = {}
        self._closed = False
        self.to_itself = False
        """True once this rank has sent a message to itself, and so may do so again."""
        self._elsewhere = [rank for rank in range(layout.size) if rank not in layout.ranks]

    def expect(self, message: RemoteMessage, data: int, size: int) -> None:
        """Post a recv and add it to the transfers of its message.

        Args:
            message: The message that the user waits for.
            data: The address of the buffer.
            size: The size of the buffer in bytes.
        """
        source, tag = message.peer, message.own.fingerprint.sequence
        with self._lock:
            expected = Expected(message, data, size, next(self._numbers), self._forget)
            message.transfers.append(expected)
            early = self._take_early(source, tag)
            if early is not None:
                expected.claim(early.source)
                if source < 0:
                    message.begin()
                expected.ask(early.header, self._transport)
                return
            if source in self._gone:
                expected.fail(self._gone[source])
                return
            if source < 0:  # even if this rank is alone on its host: it may send to itself
                expected.post_here(self._native, self._layout.ranks)
            self._waiting.setdefault((source, tag), deque()).append(expected)
            for sender in self._elsewhere if source < 0 else [source]:
                if sender not in self._senders:
                    self._senders.add(sender)
                    self._await(sender)
            self._give_up()

    def close(self) -> None:
        """Ignore all further envelopes: the native group is about to be closed."""
        with self._lock:
            self._closed = True

    def _await(self, sender: int) -> None:
        """Post a receive for the next envelope of a rank."""
        data = bytearray(Header.SIZE)
        transfer = self._transport.recv(memoryview(data), sender, tags.ENVELOPES)
        transfer.then(lambda: self._arrived(sender, data, transfer))

    def _arrived(self, sender: int, data: bytearray, transfer: Transfer) -> None:
        try:
            transfer.wait(0)
            with self._lock:
                if not self._closed:
                    self._match(sender, Header.parse(data))
                    self._await(sender)
        except TransportError as error:
            left = self._lost(Gone(sender, error))
            with self._lock:
                if not self._closed:
                    self._gone[sender] = error
                    self._give_up(everything=not left)

    def _match(self, sender: int, header: Header) -> None:
        """Give an envelope to the oldest matching recv, or keep it if there is none."""
        tag = header.fingerprint.sequence
        while (expected := self._oldest(sender, tag)) is not None:
            if expected.claim(sender):
                try:
                    expected.ask(header, self._transport)
                except TransportError as error:
                    expected.fail(error)
                    raise
                return
            # Otherwise a message of this host was first.
        early = _Early(next(self._numbers), sender, header)
        self._early.setdefault((sender, tag), deque()).append(early)

    def _oldest(self, sender: int, tag: int) -> Expected | None:
        keys = [key for key in ((sender, tag), (-1, tag)) if key in self._waiting]
        first = min(keys, key=lambda key: self._waiting[key][0].number, default=None)
        return None if first is None else _taken(self._waiting, first)

    def _take_early(self, source: int, tag: int) -> _Early | None:
        sources = self._elsewhere if source < 0 else [source]
        keys = [(each, tag) for each in sources if (each, tag) in self._early]
        first = min(keys, key=lambda key: self._early[key][0].order, default=None)
        return None if first is None else _taken(self._early, first)

    def _forget(self, expected: Expected) -> None:
        """Remove a recv from any source that a message of this host has matched."""
        key = (-1, expected.message.own.fingerprint.sequence)
        with self._lock:
            queue = self._waiting.get(key, deque())
            if expected in queue:
                queue.remove(expected)
            if not queue:
                self._waiting.pop(key, None)

    def _give_up(self, *, everything: bool = False) -> None:
        """Fail the recvs that no message can match any more."""
        if not self._gone:
            return
        nobody = len(self._gone) == len(self._elsewhere)
        if nobody:
            self._native.expect_remote(False)
        alone = nobody and len(self._layout.ranks) == 1 and not self.to_itself
        for source, tag in list(self._waiting):
            if everything or source in self._gone or (source < 0 and alone):
                error = self._gone.get(source, next(iter(self._gone.values())))
                for expected in self._waiting.pop((source, tag)):
                    expected.fail(error)


def _taken(queues: dict[tuple[int, int], deque[_T]], key: tuple[int, int]) -> _T:
    """Remove and return the first item of a queue; delete the queue if it is then empty."""
    first = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return first
