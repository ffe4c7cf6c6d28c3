"""The relay transport of one group, with the transfers between this rank and each peer."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from phalanx.system.polling import wait_until
from phalanx.transports.interface import (
    CompletableTransfer,
    TagQueues,
    Transfer,
    Transport,
    TransportError,
)
from phalanx.transports.relay import discovery
from phalanx.transports.relay.connection import RelayConnection
from phalanx.transports.relay.protocol import MAX_DATA_BYTES, Frame, Kind, LeaveReason

_log = logging.getLogger("phalanx")

_DRAIN_SECONDS = 2.0
"""The longest time that a rank that leaves waits for recvs that match its offers, in seconds."""
_LEAVE_SECONDS = 30.0
"""The longest time until the relay has received all data of a rank that leaves, in seconds."""
_POLL_SECONDS = 0.001
_ABORTED = "this rank has closed its connections"
_LEAVE_REASONS = {
    LeaveReason.DIED: "its connection to the relay is gone",
    LeaveReason.CLOSED: "it has closed its connection",
    LeaveReason.ABORTED: "it has closed its connections",
}

_EAGER_LIMIT = 32 * 2**10
"""The maximum size in bytes of an eager message."""
_MAX_EAGER_BYTES = 2**20
"""The maximum bytes of eager messages in flight to one receiver or waiting there for a recv."""
_MAX_GRANTED_BYTES = 4 * 2**20
"""The maximum bytes of other messages in flight to one receiver."""


class RelayTransport(Transport):
    """A rank's end of the relay; see `open_transport` for the arguments.

    Groups with the same `number` share a connection to the relay.
    """

    def __init__(self, store: Store, rank: int, size: int, address: str, number: int = 0) -> None:
        self._rank = rank
        self._access = discovery.connect(store, rank, address, number)
        self._connection, channel = self._access.connection, self._access.channel
        self._channel = channel
        self._peers = [_Peer(peer, channel, self._connection) for peer in range(size)]
        self._left: LeaveReason | None = None
        self._has_left = threading.Event()
        """Set when the relay has received all data, or is lost."""
        self._connection.add_listener(channel, self)  # before any peer can send to it
        self._connection.send(Frame(Kind.JOIN, channel, rank, value=size))

    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._peers[peer].send(data, tag)

    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._peers[peer].recv(data, tag)

    def has_ended(self, peer: int) -> bool:
        return self._peers[peer].has_ended()

    def abort(self) -> None:
        self._leave(LeaveReason.ABORTED)

    def close(self) -> None:
        if self._left is None:
            self._deliver()
        self._leave(LeaveReason.CLOSED)
        discovery.disconnect(self._access)

    def handle_frame(self, frame: Frame, data: memoryview) -> None:
        """Handle a frame of the group's channel; called in the connection's thread."""
        if not 0 <= frame.peer < len(self._peers):
            return
        if frame.kind is Kind.GONE:
            reason, peer = LeaveReason(frame.value), self._peers[frame.peer]
            peer.disconnect(TransportError(frame.peer, _LEAVE_REASONS[reason]))
            if reason is not LeaveReason.ABORTED:
                peer.mark_ended()
            if frame.peer == self._rank:
                self._has_left.set()
        else:
            self._peers[frame.peer].handle_frame(frame, data)

    def handle_disconnect(self, reason: str) -> None:
        """Fail all transfers: the relay is gone, and all peers with it."""
        self._has_left.set()
        host = self._access.host_rank
        for peer in self._peers:
            peer.disconnect(TransportError(host, f"the relay: {reason}"))
        if host >= 0:
            self._peers[host].mark_ended()

    def _deliver(self) -> None:
        """Leave the channel once the relay has all data that were sent."""
        wait_until(
            lambda: not any(peer.has_offers for peer in self._peers),
            _DRAIN_SECONDS,
            longest=_POLL_SECONDS,
        )
        for peer in self._peers:
            peer.hand_over()
        # The relay reports the end of this rank after it has received all that was sent before.
        self._connection.send(Frame(Kind.SUBSCRIBE, self._channel, self._rank))
        self._leave(LeaveReason.CLOSED)
        if not self._has_left.wait(_LEAVE_SECONDS):
            _log.warning(
                "rank %d leaves a group, but the relay has not confirmed within %g s that it has "
                "received all messages of this rank: some may be lost",
                self._rank,
                _LEAVE_SECONDS,
            )

    def _leave(self, reason: LeaveReason) -> None:
        """Leave the channel; a rank that has aborted closes its connections later."""
        if self._left in (reason, LeaveReason.CLOSED):
            return
        self._left = reason
        self._connection.send(Frame(Kind.LEAVE, self._channel, self._rank, value=reason))
        for peer in self._peers:
            peer.disconnect(TransportError(-1, _ABORTED))


class _RelayTransfer(CompletableTransfer):
    """A send or a receive, with its progress in bytes."""

    def __init__(self, data: memoryview, schedule: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(schedule)
        self.data = data
        self.transferred = self.granted = 0


class _UnexpectedMessage(NamedTuple):
    """A message that has arrived before its recv was posted.

    It has either its data, or a number with which to request them.
    """

    size: int
    number: int
    data: bytes | None


class _Peer:
    """Another rank of the group, as seen by this rank.

    Args:
        rank: The rank of the peer in the group.
        channel: The identifier of the group's channel.
        connection: The connection to the relay.
    """

    def __init__(self, rank: int, channel: bytes, connection: RelayConnection) -> None:
        self._rank, self._channel, self._connection = rank, channel, connection
        self._lock = threading.Lock()
        self._is_subscribed = self._is_present = self._has_ended = False
        self._disconnect_error: TransportError | None = None
        self._queued_frames: deque[tuple[Frame, bytes]] = deque()
        self._numbers = itertools.count()
        self._eager_bytes = 0  # of messages that the peer's recvs have not taken
        self._offered_sends: dict[int, _RelayTransfer] = {}
        self._posted_receives = TagQueues[_RelayTransfer]()
        self._unexpected_messages = TagQueues[_UnexpectedMessage]()
        self._active_receives: dict[int, _RelayTransfer] = {}
        self._ungranted: deque[int] = deque()  # numbers of the active receives not fully granted
        self._granted_bytes = 0

    @property
    def has_offers(self) -> bool:
        """True if a message was offered to the peer, and not all of its data have arrived."""
        with self._lock:
            return bool(self._offered_sends)

    def hand_over(self) -> None:
        """Leave the frames for a peer that is not present with the relay, which delivers them."""
        with self._lock:
            self._send_queued()

    def send(self, data: memoryview, tag: int) -> Transfer:
        """Post a send of bytes with a tag."""
        transfer = _RelayTransfer(data, self._connection.callbacks.submit)
        size = len(data)
        with self._lock:
            self._check()
            if size <= _EAGER_LIMIT and self._eager_bytes + size <= _MAX_EAGER_BYTES:
                self._eager_bytes += size
                self._send(Kind.EAGER, tag, data=bytes(data))
                transfer.complete()
            else:
                number = next(self._numbers)
                self._offered_sends[number] = transfer
                self._send(Kind.OFFER, tag, number, size)
        return transfer

    def recv(self, data: memoryview, tag: int) -> Transfer:
        """Post a receive of bytes with a tag."""
        transfer = _RelayTransfer(data, self._connection.callbacks.submit)
        with self._lock:
            if (message := self._unexpected_messages.pop_oldest(tag)) is not None:
                self._match(transfer, message)
            else:
                self._check()
                self._subscribe()
                self._posted_receives.append(tag, transfer)
        return transfer

    def handle_frame(self, frame: Frame, data: memoryview) -> None:
        """Handle a frame from the peer, or from the relay about the peer."""
        with self._lock:
            if frame.kind is Kind.PRESENT:
                self._is_present = True
                self._send_queued()
            elif frame.kind is Kind.EAGER:
                self._handle_message(frame.tag, _UnexpectedMessage(len(data), 0, bytes(data)))
            elif frame.kind is Kind.OFFER:
                self._handle_message(frame.tag, _UnexpectedMessage(frame.value, frame.number, None))
            elif frame.kind is Kind.CREDIT:
                self._eager_bytes -= frame.value
            elif frame.kind is Kind.GRANT:
                self._send_data(frame.number, frame.value)
            elif frame.kind is Kind.DATA:
                self._receive_data(frame, data)
            elif frame.kind in (Kind.DONE, Kind.REJECT) and frame.number in self._offered_sends:
                rejected = TransportError(self._rank, "it expects a different size than was sent")
                error = rejected if frame.kind is Kind.REJECT else None
                self._offered_sends.pop(frame.number).complete(error)

    def disconnect(self, error: TransportError) -> None:
        """Fail all pending transfers: the peer or the connection to it is gone."""
        with self._lock:
            if self._disconnect_error is not None:
                return
            self._disconnect_error = error
            # Messages whose data have arrived can still be received, up to one that is lost.
            self._unexpected_messages.keep_while(lambda message: message.data is not None)
            pending = [*self._offered_sends.values(), *self._active_receives.values()]
            pending += self._posted_receives.remove_all()
            self._offered_sends.clear()
            self._active_receives.clear()
            self._ungranted.clear()
            self._queued_frames.clear()
        for transfer in pending:
            transfer.complete(error)

    def has_ended(self) -> bool:
        """Return whether the peer is known to have left for good, or died."""
        with self._lock:
            self._subscribe()
        return self._has_ended

    def mark_ended(self) -> None:
        """Record that the peer has left for good, or died."""
        self._has_ended = True

    def _check(self) -> None:
        if self._disconnect_error is not None:
            raise TransportError(self._disconnect_error.peer, str(self._disconnect_error))

    def _subscribe(self) -> None:
        """Request, once, that the relay reports when the peer is present and when it is gone."""
        if not self._is_subscribed:
            self._is_subscribed = True
            self._connection.send(Frame(Kind.SUBSCRIBE, self._channel, self._rank))

    def _send(
        self, kind: Kind, tag: int = 0, number: int = 0, value: int = 0, data: bytes = b""
    ) -> None:
        frame = Frame(kind, self._channel, self._rank, tag, number, value)
        self._subscribe()
        if self._is_present:
            self._connection.send(frame, data)
        elif self._disconnect_error is None:
            self._queued_frames.append((frame, data))

    def _send_queued(self) -> None:
        while self._queued_frames:
            self._connection.send(*self._queued_frames.popleft())

    def _handle_message(self, tag: int, message: _UnexpectedMessage) -> None:
        transfer = self._posted_receives.pop_oldest(tag)
        if transfer is None:
            self._unexpected_messages.append(tag, message)
        else:
            self._match(transfer, message)

    def _match(self, transfer: _RelayTransfer, message: _UnexpectedMessage) -> None:
        """Handle the match of a message with its recv."""
        same_size = message.size == len(transfer.data)
        if message.data is not None:
            self._send(Kind.CREDIT, value=message.size)
            if same_size:
                transfer.data[:] = message.data
                transfer.complete()
        elif same_size:
            self._active_receives[message.number] = transfer
            self._ungranted.append(message.number)
            self._grant()
        else:
            self._send(Kind.REJECT, number=message.number)
        if not same_size:
            size = len(transfer.data)
            reason = f"it sends {message.size} B, but {size} B are expected"
            transfer.complete(TransportError(self._rank, reason))

    def _grant(self) -> None:
        """Request data, oldest message first, up to the limit of data in flight."""
        while self._ungranted and self._granted_bytes < _MAX_GRANTED_BYTES:
            number = self._ungranted[0]
            transfer = self._active_receives[number]
            size = min(
                len(transfer.data) - transfer.granted, _MAX_GRANTED_BYTES - self._granted_bytes
            )
            transfer.granted += size
            self._granted_bytes += size
            self._send(Kind.GRANT, number=number, value=transfer.granted)
            if transfer.granted == len(transfer.data):
                self._ungranted.popleft()

    def _send_data(self, number: int, limit: int) -> None:
        """Send the requested data of a message, up to the offset `limit`."""
        transfer = self._offered_sends.get(number)
        if transfer is None:
            return
        limit = min(limit, len(transfer.data))
        while transfer.transferred < limit:
            end = min(limit, transfer.transferred + MAX_DATA_BYTES)
            part = bytes(transfer.data[transfer.transferred : end])
            self._send(Kind.DATA, number=number, value=transfer.transferred, data=part)
            transfer.transferred = end

    def _receive_data(self, frame: Frame, data: memoryview) -> None:
        """Handle data of a message that have arrived."""
        transfer = self._active_receives.get(frame.number)
        if transfer is None:
            return
        end = transfer.transferred + len(data)
        if frame.value != transfer.transferred or end > transfer.granted:
            del self._active_receives[frame.number]
            self._ungranted = deque(number for number in self._ungranted if number != frame.number)
            transfer.complete(TransportError(self._rank, "it sent data that were not requested"))
            return
        transfer.data[transfer.transferred : end] = data
        transfer.transferred = end
        self._granted_bytes -= len(data)
        if end == len(transfer.data):
            del self._active_receives[frame.number]
            self._send(Kind.DONE, number=frame.number)
            transfer.complete()
        self._grant()
