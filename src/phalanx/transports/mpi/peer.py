"""Pending transfers between this rank and one peer; only for the MPI thread."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING

from phalanx.transports.mpi.protocol import MAX_EAGER_BYTES, Kind, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.transports.mpi.messages import Communicator
    from phalanx.transports.mpi.transfer import MpiTransfer

__all__ = ["Peer"]

_PEER_CLOSED = "it has closed its connections"
_UNKNOWN = -1


class Peer:
    """Another rank of the group, as seen by this rank.

    Args:
        communicator: The sends and receives through MPI.
        transport: The name of the transport, the same on all ranks of the group.
        rank: This rank in the group.
        look_up: Called once, when the peer's process must be looked up; the result is to be passed
            to `set_process`.
    """

    def __init__(
        self, communicator: Communicator, transport: int, rank: int, look_up: Callable[[], None]
    ) -> None:
        self._communicator, self._transport, self._rank = communicator, transport, rank
        self._look_up: Callable[[], None] | None = look_up
        self._process = (
            _UNKNOWN  # the peer's process, by its rank among all that mpirun has started
        )
        self._close_reason = self._gone_reason = ""
        self._is_close_sent = False
        self._queued_sends: deque[MpiTransfer] = deque()  # until the peer's process is known
        self._offer_count = 0
        self._offered_sends: dict[int, MpiTransfer] = {}
        self._posted_receives: defaultdict[int, deque[MpiTransfer]] = defaultdict(deque)
        self._unexpected_messages: defaultdict[int, deque[Message]] = defaultdict(deque)
        # MPI holds the buffers of these:
        self._active_sends: list[MpiTransfer] = []
        self._active_receives: list[MpiTransfer] = []

    @property
    def pending_sends(self) -> list[MpiTransfer]:
        """The sends that have not completed yet."""
        return [*self._queued_sends, *self._offered_sends.values(), *self._active_sends]

    def send(self, transfer: MpiTransfer) -> None:
        """Start a send, after all sends before."""
        if reason := self._close_reason or self._gone_reason:
            transfer.finish(reason)
        elif self._process == _UNKNOWN:
            self._queued_sends.append(transfer)
            self._request_lookup()
        elif transfer.data.nbytes <= MAX_EAGER_BYTES:
            self._send_message(Kind.EAGER, transfer.tag, payload=bytes(transfer.data))
            transfer.finish()
        else:
            self._offer_count += 1
            self._offered_sends[self._offer_count] = transfer
            self._send_message(Kind.OFFER, transfer.tag, self._offer_count, transfer.data.nbytes)

    def recv(self, transfer: MpiTransfer) -> None:
        """Start a receive, after all receives posted before."""
        if self._close_reason:
            transfer.finish(self._close_reason)
            return
        self._posted_receives[transfer.tag].append(transfer)
        self._match(transfer.tag)
        if self._gone_reason:
            self._fail_unstarted(self._gone_reason)
        elif self._process == _UNKNOWN:
            self._request_lookup()

    def set_process(self, process: int) -> None:
        """Set the peer's process, unless it is already known, and start the queued sends."""
        if self._process == _UNKNOWN:
            self._process = process
            self._send_message(Kind.HELLO)
            self._flush_queued_sends()

    def handle_message(self, message: Message, source: int) -> None:
        """Handle a message from the peer."""
        if self._process == _UNKNOWN:
            self._process = source
            self._flush_queued_sends()
        if message.kind is Kind.REQUEST:
            self._send_data(message)
        elif message.kind is Kind.CANCELLED:
            self._communicator.cancel(self._process, message.tag)
        elif self._close_reason:
            self.advance_shutdown()  # the peer was unknown until now, so CLOSED was not sent
        elif message.kind is Kind.CLOSED:
            self.disconnect(_PEER_CLOSED)
        elif message.kind is not Kind.HELLO:
            self._unexpected_messages[message.tag].append(message)
            self._match(message.tag)

    def disconnect(self, reason: str) -> None:
        """Fail all transfers except those that MPI holds: the peer is gone."""
        self._gone_reason = reason
        for tag, messages in list(self._unexpected_messages.items()):
            kept = deque(each for each in messages if each.kind is Kind.EAGER)
            self._unexpected_messages[tag] = kept
        self._fail_unstarted(reason)

    def close(self, reason: str) -> None:
        """Fail all transfers except those that MPI holds: this rank's transport is closed."""
        self._close_reason = reason
        self._unexpected_messages.clear()
        self._fail_unstarted(reason)

    def advance_shutdown(self) -> bool:
        """Send CLOSED to the peer once it has the data that it requested.

        Returns whether MPI holds no more transfers.
        """
        if self._process != _UNKNOWN and not self._is_close_sent and not self._active_sends:
            self._is_close_sent = True
            self._send_message(Kind.CLOSED)
        return not self._active_sends and not self._active_receives

    def fail(self, reason: str) -> None:
        """Fail all transfers: MPI cannot be used any more."""
        self._close_reason = self._close_reason or reason
        self._fail_unstarted(reason)
        for transfer in (*self._active_sends, *self._active_receives):
            transfer.finish(reason)
        self._active_sends, self._active_receives = [], []

    def _request_lookup(self) -> None:
        if self._look_up is not None:
            self._look_up()
            self._look_up = None

    def _flush_queued_sends(self) -> None:
        queued, self._queued_sends = self._queued_sends, deque()
        for transfer in queued:
            self.send(transfer)

    def _match(self, tag: int) -> None:
        """Match arrived messages with posted receives, the oldest first."""
        posted, arrived = self._posted_receives[tag], self._unexpected_messages[tag]
        while posted and arrived:
            transfer, message = posted.popleft(), arrived.popleft()
            size = message.size or len(message.payload)
            if size != transfer.data.nbytes:
                transfer.finish(f"it sends {size} B, but {transfer.data.nbytes} B are expected")
            elif message.kind is Kind.EAGER:
                transfer.data[:] = message.payload
                transfer.finish()
            else:
                self._request_data(transfer, message)
        if not posted:
            del self._posted_receives[tag]
        if not arrived:
            del self._unexpected_messages[tag]

    def _request_data(self, transfer: MpiTransfer, offer: Message) -> None:
        """Request the data of an offer; they arrive directly in the buffer of the receive."""
        self._active_receives.append(transfer)
        done = partial(self._receive_done, transfer)
        tag = self._communicator.receive_data(self._process, transfer.data, done)
        self._send_message(Kind.REQUEST, tag, offer.number)

    def _receive_done(self, transfer: MpiTransfer, completed: bool) -> None:
        self._active_receives.remove(transfer)
        transfer.finish("" if completed else self._gone_reason or _PEER_CLOSED)

    def _send_data(self, request: Message) -> None:
        """Send the data of an offer, or CANCELLED if the offer was withdrawn."""
        transfer = self._offered_sends.pop(request.number, None)
        if transfer is None:
            self._send_message(Kind.CANCELLED, request.tag)
            return
        self._active_sends.append(transfer)
        done = partial(self._send_done, transfer)
        self._communicator.send_data(self._process, transfer.data, request.tag, done)

    def _send_done(self, transfer: MpiTransfer, completed: bool) -> None:
        self._active_sends.remove(transfer)
        transfer.finish("" if completed else self._gone_reason or _PEER_CLOSED)

    def _fail_unstarted(self, reason: str) -> None:
        """Fail all transfers that MPI does not hold."""
        posted = [transfer for each in self._posted_receives.values() for transfer in each]
        for transfer in (*self._queued_sends, *self._offered_sends.values(), *posted):
            transfer.finish(reason)
        self._queued_sends.clear()
        self._offered_sends.clear()
        self._posted_receives.clear()

    def _send_message(
        self, kind: Kind, tag: int = 0, number: int = 0, size: int = 0, payload: bytes = b""
    ) -> None:
        message = Message(self._transport, kind, self._rank, tag, number, size, payload)
        self._communicator.send_message(self._process, message)
