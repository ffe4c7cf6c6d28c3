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
from phalanx.hierarchical.transfers import ConnectionLost, bytes_at
from phalanx.transports import Transfer, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx import _native
    from phalanx.hierarchical.messages import RemoteMessage
    from phalanx.topology import Layout
    from phalanx.transports import Transport

__all__ = ["MessageMatcher", "PostedReceive"]

_T = TypeVar("_T")

_POLL_INTERVAL = 0.0005
"""Seconds between two checks for a local message, while a remote one may arrive too."""


class PostedReceive(Transfer):
    """A posted recv; its transfer is known once an envelope has announced its message.

    Args:
        message: The message that the user waits for.
        data: The address of the buffer.
        size: The size of the buffer in bytes.
        number: The position of the recv among all posted recvs.
        remove: Called with the recv when a message of this host has matched it.
    """

    def __init__(
        self,
        message: RemoteMessage,
        data: int,
        size: int,
        number: int,
        remove: Callable[[PostedReceive], None],
    ) -> None:
        self.message, self.number = message, number
        self._remove = remove
        self._data, self._size = data, size
        self._resolved = threading.Event()
        self._claim_lock = threading.Lock()
        self._transfer: Transfer | None = None
        self._error: TransportError | None = None
        self._group: _native.Group | None = None
        self._local: _native.Message | None = None
        self._ranks: tuple[int, ...] = ()

    def post_locally(self, group: _native.Group, ranks: tuple[int, ...]) -> None:
        """Post the recv in this host's native group too."""
        fingerprint = self.message.header.fingerprint
        self._group, self._ranks = group, ranks
        self._local = group.irecv(
            self._data, fingerprint.count, fingerprint.dtype, -1, fingerprint.sequence
        )

    def claim(self, source: int) -> bool:
        """Match the recv with a message of another host; return whether that succeeded.

        It fails if a message of this host has arrived first.
        """
        with self._claim_lock:
            if self._local is not None and self._group is not None:
                if not self._group.withdraw(self._local, source):
                    return False
                self._local = None
            self.message.peer = source
        return True

    def receive_data(self, header: Header, transport: Transport) -> None:
        """Receive the announced data, if they match this recv."""
        self.message.check_header(header)
        if not self.message.done and self._size:
            data = bytes_at(self._data, self._size)
            self._transfer = transport.recv(data, self.message.peer, tags.data_tag(header.number))
        self._resolved.set()

    def fail(self, error: TransportError) -> None:
        """Fail the recv: no message will match it."""
        self._error = error
        self._resolved.set()

    @property
    def is_idle(self) -> bool:
        """True if the transport has no transfer for this recv; after a failure it gets none."""
        return self._transfer is None

    def wait(self, timeout: float) -> bool:
        """Block until the data have arrived, from any host; return whether they have."""
        end = time.monotonic() + timeout
        while not self._resolved.is_set():
            if self._has_local_message():
                self._remove(self)
                return True
            remaining = max(0.0, end - time.monotonic())
            self._resolved.wait(
                min(remaining, _POLL_INTERVAL) if self._local is not None else remaining
            )
            if not remaining:
                break
        if not self._resolved.is_set():
            return False
        if self._error is not None:
            raise self._error
        return self._transfer is None or self._transfer.wait(max(0.0, end - time.monotonic()))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Raise `NotImplementedError`: callers only wait for messages."""
        raise NotImplementedError

    def _has_local_message(self) -> bool:
        """Return whether a message of this host has arrived."""
        with self._claim_lock:
            local, group = self._local, self._group
            if local is None or group is None or not (local.done or group.test(local)):
                return False
            if local.status is not None:
                raise TransportError(-1, "the group is broken")
            self.message.peer = self._ranks[local.peer]
        return True


class _UnexpectedMessage(NamedTuple):
    """An envelope for which no matching recv is posted yet."""

    number: int
    """The position of the envelope in the order of arrival."""
    source: int
    header: Header


class MessageMatcher:
    """The recvs of a group that messages of other hosts may match.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        transport: The transport that carries bytes between hosts.
        handle_connection_lost: See `FailurePropagator.handle_connection_lost`.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        transport: Transport,
        handle_connection_lost: Callable[[ConnectionLost], bool],
    ) -> None:
        self._native = native
        self._layout = layout
        self._transport = transport
        self._handle_connection_lost = handle_connection_lost
        self._lock = threading.RLock()
        self._sequence = itertools.count()
        self._posted: dict[tuple[int, int], deque[PostedReceive]] = {}
        self._unexpected: dict[tuple[int, int], deque[_UnexpectedMessage]] = {}
        self._senders: set[int] = set()
        self._lost_senders: dict[int, TransportError] = {}
        self._closed = False
        self.sends_to_self = False
        """True once this rank has sent a message to itself, since it may do so again."""
        self._remote_ranks = [rank for rank in range(layout.size) if rank not in layout.ranks]

    def post(self, message: RemoteMessage, data: int, size: int) -> None:
        """Post a recv and add it to the transfers of its message.

        Args:
            message: The message that the user waits for.
            data: The address of the buffer.
            size: The size of the buffer in bytes.
        """
        source, tag = message.peer, message.header.fingerprint.sequence
        with self._lock:
            receive = PostedReceive(message, data, size, next(self._sequence), self._remove)
            message.transfers.append(receive)
            unexpected = self._take_unexpected(source, tag)
            if unexpected is not None:
                receive.claim(unexpected.source)
                if source < 0:
                    message.record_begin()
                receive.receive_data(unexpected.header, self._transport)
                return
            if source in self._lost_senders:
                receive.fail(self._lost_senders[source])
                return
            if source < 0:  # even if this rank is alone on its host: it may send to itself
                receive.post_locally(self._native, self._layout.ranks)
            self._posted.setdefault((source, tag), deque()).append(receive)
            for sender in self._remote_ranks if source < 0 else [source]:
                if sender not in self._senders:
                    self._senders.add(sender)
                    self._post_envelope_receive(sender)
            self._fail_unmatchable()

    def close(self) -> None:
        """Ignore all further envelopes: the native group is about to be closed."""
        with self._lock:
            self._closed = True

    def _post_envelope_receive(self, sender: int) -> None:
        """Post a receive for the next envelope of a rank."""
        data = bytearray(Header.SIZE)
        transfer = self._transport.recv(memoryview(data), sender, tags.ENVELOPES)
        transfer.add_done_callback(lambda: self._handle_envelope(sender, data, transfer))

    def _handle_envelope(self, sender: int, data: bytearray, transfer: Transfer) -> None:
        try:
            transfer.wait(0)
            with self._lock:
                if not self._closed:
                    self._match_envelope(sender, Header.parse(data))
                    self._post_envelope_receive(sender)
        except TransportError as error:
            has_left = self._handle_connection_lost(ConnectionLost(sender, error))
            with self._lock:
                if not self._closed:
                    self._lost_senders[sender] = error
                    self._fail_unmatchable(everything=not has_left)

    def _match_envelope(self, sender: int, header: Header) -> None:
        """Give an envelope to the oldest matching recv, or keep it if there is none."""
        tag = header.fingerprint.sequence
        while (receive := self._take_posted(sender, tag)) is not None:
            if receive.claim(sender):
                try:
                    receive.receive_data(header, self._transport)
                except TransportError as error:
                    receive.fail(error)
                    raise
                return
            # A message of this host has matched the recv first.
        unexpected = _UnexpectedMessage(next(self._sequence), sender, header)
        self._unexpected.setdefault((sender, tag), deque()).append(unexpected)

    def _take_posted(self, sender: int, tag: int) -> PostedReceive | None:
        keys = [key for key in ((sender, tag), (-1, tag)) if key in self._posted]
        oldest = min(keys, key=lambda key: self._posted[key][0].number, default=None)
        return None if oldest is None else _pop_first(self._posted, oldest)

    def _take_unexpected(self, source: int, tag: int) -> _UnexpectedMessage | None:
        sources = self._remote_ranks if source < 0 else [source]
        keys = [(each, tag) for each in sources if (each, tag) in self._unexpected]
        oldest = min(keys, key=lambda key: self._unexpected[key][0].number, default=None)
        return None if oldest is None else _pop_first(self._unexpected, oldest)

    def _remove(self, receive: PostedReceive) -> None:
        """Remove a recv from any source that a message of this host has matched."""
        key = (-1, receive.message.header.fingerprint.sequence)
        with self._lock:
            queue = self._posted.get(key, deque())
            if receive in queue:
                queue.remove(receive)
            if not queue:
                self._posted.pop(key, None)

    def _fail_unmatchable(self, *, everything: bool = False) -> None:
        """Fail the recvs that no message can match any more."""
        if not self._lost_senders:
            return
        all_lost = len(self._lost_senders) == len(self._remote_ranks)
        if all_lost:
            self._native.expect_remote(False)
        is_alone = all_lost and len(self._layout.ranks) == 1 and not self.sends_to_self
        for source, tag in list(self._posted):
            if everything or source in self._lost_senders or (source < 0 and is_alone):
                error = self._lost_senders.get(source, next(iter(self._lost_senders.values())))
                for receive in self._posted.pop((source, tag)):
                    receive.fail(error)


def _pop_first(queues: dict[tuple[int, int], deque[_T]], key: tuple[int, int]) -> _T:
    """Remove and return the first item of a queue; delete the queue if it is then empty."""
    first = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return first
