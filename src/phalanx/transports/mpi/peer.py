"""Pending transfers between this rank and one peer; only for the thread of MPI."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING

from phalanx.transports.mpi.protocol import MOST_TEXT, Kind, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.transports.mpi.messages import Wire
    from phalanx.transports.mpi.transfer import MpiTransfer

__all__ = ["Peer"]

_GONE = "it has ended its connections"
_NOWHERE = -1


class Peer:
    """Another rank of the group, as seen by this rank.

    Args:
        wire: The sends and receives through MPI.
        transport: The name of the transport, the same on all ranks of the group.
        rank: This rank in the group.
        find: Called once, when the peer's process must be looked up; `found` gets the result.
    """

    def __init__(self, wire: Wire, transport: int, rank: int, find: Callable[[], None]) -> None:
        self._wire, self._transport, self._rank = wire, transport, rank
        self._find: Callable[[], None] | None = find
        self._place = _NOWHERE  # the peer's process, by its rank in the world
        self._over = self._gone = ""
        self._told = False
        self._waiting: deque[MpiTransfer] = deque()  # sends, until the peer's process is known
        self._offers = 0
        self._offered: dict[int, MpiTransfer] = {}
        self._posted: defaultdict[int, deque[MpiTransfer]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._sending: list[MpiTransfer] = []  # held by MPI, as those in _receiving
        self._receiving: list[MpiTransfer] = []

    @property
    def sends(self) -> list[MpiTransfer]:
        """The sends that have not ended yet."""
        return [*self._waiting, *self._offered.values(), *self._sending]

    def send(self, transfer: MpiTransfer) -> None:
        """Begin a send, after all sends before."""
        if reason := self._over or self._gone:
            transfer.finish(reason)
        elif self._place == _NOWHERE:
            self._waiting.append(transfer)
            self._look()
        elif transfer.data.nbytes <= MOST_TEXT:
            self._tell(Kind.TEXT, transfer.tag, text=bytes(transfer.data))
            transfer.finish()
        else:
            self._offers += 1
            self._offered[self._offers] = transfer
            self._tell(Kind.OFFER, transfer.tag, self._offers, transfer.data.nbytes)

    def recv(self, transfer: MpiTransfer) -> None:
        """Begin a receive, after all receives posted before."""
        if self._over:
            transfer.finish(self._over)
            return
        self._posted[transfer.tag].append(transfer)
        self._match(transfer.tag)
        if self._gone:
            self._give_up(self._gone)
        elif self._place == _NOWHERE:
            self._look()

    def found(self, place: int) -> None:
        """Set the peer's process, unless it is known already, and send what waits for it."""
        if self._place == _NOWHERE:
            self._place = place
            self._tell(Kind.HELLO)
            self._go_on()

    def take(self, message: Message, source: int) -> None:
        """Handle a message from the peer."""
        if self._place == _NOWHERE:
            self._place = source
            self._go_on()
        if message.kind is Kind.ASK:
            self._give(message)
        elif message.kind is Kind.REFUSED:
            self._wire.cancel(self._place, message.tag)
        elif self._over:
            self.settle()  # the peer was unknown until now, so it was not told of the end
        elif message.kind is Kind.GONE:
            self.lose(_GONE)
        elif message.kind is not Kind.HELLO:
            self._arrived[message.tag].append(message)
            self._match(message.tag)

    def lose(self, reason: str) -> None:
        """Fail all transfers but those that MPI holds: the peer is gone."""
        self._gone = reason
        for tag, messages in list(self._arrived.items()):
            self._arrived[tag] = deque(each for each in messages if each.kind is Kind.TEXT)
        self._give_up(reason)

    def end(self, reason: str) -> None:
        """Fail all transfers but those that MPI holds: this rank's transport ends."""
        self._over = reason
        self._arrived.clear()
        self._give_up(reason)

    def settle(self) -> bool:
        """Tell the peer of the end, once it has the data that it requested.

        Returns whether MPI holds no transfers any more.
        """
        if self._place != _NOWHERE and not self._told and not self._sending:
            self._told = True
            self._tell(Kind.GONE)
        return not self._sending and not self._receiving

    def fail(self, reason: str) -> None:
        """Fail all transfers: MPI cannot be used any more."""
        self._over = self._over or reason
        self._give_up(reason)
        for transfer in (*self._sending, *self._receiving):
            transfer.finish(reason)
        self._sending, self._receiving = [], []

    def _look(self) -> None:
        if self._find is not None:
            self._find()
            self._find = None

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for transfer in waiting:
            self.send(transfer)

    def _match(self, tag: int) -> None:
        """Match arrived messages with posted receives, the oldest first."""
        posted, arrived = self._posted[tag], self._arrived[tag]
        while posted and arrived:
            transfer, message = posted.popleft(), arrived.popleft()
            size = message.size or len(message.text)
            if size != transfer.data.nbytes:
                transfer.finish(f"it sends {size} B, but {transfer.data.nbytes} B are expected")
            elif message.kind is Kind.TEXT:
                transfer.data[:] = message.text
                transfer.finish()
            else:
                self._ask(transfer, message)
        if not posted:
            del self._posted[tag]
        if not arrived:
            del self._arrived[tag]

    def _ask(self, transfer: MpiTransfer, offer: Message) -> None:
        """Request the data of an offer, directly into the buffer of the receive."""
        self._receiving.append(transfer)
        done = partial(self._received, transfer)
        tag = self._wire.receive(self._place, transfer.data, done)
        self._tell(Kind.ASK, tag, offer.number)

    def _received(self, transfer: MpiTransfer, carried: bool) -> None:
        self._receiving.remove(transfer)
        transfer.finish("" if carried else self._gone or _GONE)

    def _give(self, asked: Message) -> None:
        """Send the data of an offer, or refuse if the offer was taken back."""
        transfer = self._offered.pop(asked.number, None)
        if transfer is None:
            self._tell(Kind.REFUSED, asked.tag)
            return
        self._sending.append(transfer)
        done = partial(self._sent, transfer)
        self._wire.send(self._place, transfer.data, asked.tag, done)

    def _sent(self, transfer: MpiTransfer, carried: bool) -> None:
        self._sending.remove(transfer)
        transfer.finish("" if carried else self._gone or _GONE)

    def _give_up(self, reason: str) -> None:
        """Fail all transfers that MPI does not hold yet."""
        posted = [transfer for each in self._posted.values() for transfer in each]
        for transfer in (*self._waiting, *self._offered.values(), *posted):
            transfer.finish(reason)
        self._waiting.clear()
        self._offered.clear()
        self._posted.clear()

    def _tell(
        self, kind: Kind, tag: int = 0, number: int = 0, size: int = 0, text: bytes = b""
    ) -> None:
        message = Message(self._transport, kind, self._rank, tag, number, size, text)
        self._wire.tell(self._place, message)
