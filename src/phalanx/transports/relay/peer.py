"""Transfers between this rank and one peer."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from phalanx.transports.completable_transfer import Announced
from phalanx.transports.interface import TransportError
from phalanx.transports.relay.frames import Kind, Word
from phalanx.transports.relay.sockets import FRAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.transports.interface import Transfer
    from phalanx.transports.relay.connection import Line

__all__ = ["Peer"]

_Waiting = TypeVar("_Waiting")

_SMALL = 32 * 2**10
"""Most bytes of a message whose data are sent without an offer."""
_MOST_SMALL = 2**20
"""Most bytes of small messages in flight to one receiver or waiting there for a recv."""
_MOST_GRANTED = 4 * 2**20
"""Most bytes of other messages in flight to one receiver."""


class _RelayTransfer(Announced):
    """A send or a receive, with its progress in bytes."""

    def __init__(self, data: memoryview, call: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(data, call)
        self.moved = self.granted = 0


class _Message:
    """A message that has arrived before its recv.

    It has either its data, or a number with which to request them.
    """

    def __init__(self, size: int, number: int, data: bytes | None) -> None:
        self.size = size
        self.number = number
        self.data = data


class Peer:
    """Another rank of the group, as seen by this rank.

    Args:
        rank: The rank of the peer in the group.
        channel: The identifier of the group's channel.
        line: The connection to the relay.
    """

    def __init__(self, rank: int, channel: bytes, line: Line) -> None:
        self._rank, self._channel, self._line = rank, channel, line
        self._lock = threading.Lock()
        self._sought = self._there = False
        self._gone: TransportError | None = None
        self._unsaid: deque[tuple[Word, bytes]] = deque()
        self._numbers = itertools.count()
        self._small = 0  # bytes of small messages that the peer's recvs have not taken
        self._offers: dict[int, _RelayTransfer] = {}
        self._awaited: dict[int, deque[_RelayTransfer]] = {}
        self._arrived: dict[int, deque[_Message]] = {}
        self._coming: dict[int, _RelayTransfer] = {}
        self._wanting: deque[int] = deque()  # numbers of incoming messages not fully granted
        self._granted = 0

    @property
    def idle(self) -> bool:
        """True if all data sent to the peer have arrived or were queued on the line."""
        with self._lock:
            return not self._offers and not self._unsaid

    def send(self, data: memoryview, tag: int) -> Transfer:
        """Post a send of bytes under a tag."""
        transfer = _RelayTransfer(data, self._line.call)
        size = len(data)
        with self._lock:
            self._check()
            if size <= _SMALL and self._small + size <= _MOST_SMALL:
                self._small += size
                self._say(Kind.SMALL, tag, data=bytes(data))
                transfer.end()
            else:
                number = next(self._numbers)
                self._offers[number] = transfer
                self._say(Kind.OFFER, tag, number, size)
        return transfer

    def recv(self, data: memoryview, tag: int) -> Transfer:
        """Post a receive of bytes under a tag."""
        transfer = _RelayTransfer(data, self._line.call)
        with self._lock:
            if (message := _first(self._arrived, tag)) is not None:
                self._match(transfer, message)
            else:
                self._check()
                self._seek()
                self._awaited.setdefault(tag, deque()).append(transfer)
        return transfer

    def heard(self, word: Word, data: memoryview) -> None:
        """Handle a word from the peer, or from the relay about the peer."""
        with self._lock:
            if word.kind is Kind.THERE:
                self._there = True
                while self._unsaid:
                    self._line.say(*self._unsaid.popleft())
            elif word.kind is Kind.SMALL:
                self._came(word.tag, _Message(len(data), 0, bytes(data)))
            elif word.kind is Kind.OFFER:
                self._came(word.tag, _Message(word.value, word.number, None))
            elif word.kind is Kind.TAKEN:
                self._small -= word.value
            elif word.kind is Kind.GRANT:
                self._give(word.number, word.value)
            elif word.kind is Kind.DATA:
                self._take(word, data)
            elif word.kind in (Kind.DONE, Kind.REFUSE) and word.number in self._offers:
                wrong = TransportError(self._rank, "it expects another size than was sent")
                error = wrong if word.kind is Kind.REFUSE else None
                self._offers.pop(word.number).end(error)

    def lose(self, error: TransportError) -> None:
        """Fail all pending transfers: the peer, or the connection to it, is gone."""
        with self._lock:
            if self._gone is not None:
                return
            self._gone = error
            # Messages whose data have arrived can still be received.
            for messages in self._arrived.values():
                kept = [message for message in messages if message.data is not None]
                messages.clear()
                messages.extend(kept)
            lost = [*self._offers.values(), *self._coming.values()]
            lost += [each for awaited in self._awaited.values() for each in awaited]
            for waiting in (self._offers, self._coming, self._awaited):
                waiting.clear()
            self._wanting.clear()
            self._unsaid.clear()
        for transfer in lost:
            transfer.end(error)

    def _check(self) -> None:
        if self._gone is not None:
            raise TransportError(self._gone.peer, str(self._gone))

    def _seek(self) -> None:
        """Request, once, that the relay reports when the peer is present and when it is gone."""
        if not self._sought:
            self._sought = True
            self._line.say(Word(Kind.SEEK, self._channel, self._rank))

    def _say(
        self, kind: Kind, tag: int = 0, number: int = 0, value: int = 0, data: bytes = b""
    ) -> None:
        word = Word(kind, self._channel, self._rank, tag, number, value)
        self._seek()
        if self._there:
            self._line.say(word, data)
        elif self._gone is None:
            self._unsaid.append((word, data))

    def _came(self, tag: int, message: _Message) -> None:
        transfer = _first(self._awaited, tag)
        if transfer is None:
            self._arrived.setdefault(tag, deque()).append(message)
        else:
            self._match(transfer, message)

    def _match(self, transfer: _RelayTransfer, message: _Message) -> None:
        """Handle the match of a message with its recv."""
        right = message.size == len(transfer.data)
        if message.data is not None:
            self._say(Kind.TAKEN, value=message.size)
            if right:
                transfer.data[:] = message.data
                transfer.end()
        elif right:
            self._coming[message.number] = transfer
            self._wanting.append(message.number)
            self._grant()
        else:
            self._say(Kind.REFUSE, number=message.number)
        if not right:
            size = len(transfer.data)
            words = f"it has sent {message.size} bytes, where {size} are expected"
            transfer.end(TransportError(self._rank, words))

    def _grant(self) -> None:
        """Request data, oldest message first, up to the limit of data in flight."""
        while self._wanting and self._granted < _MOST_GRANTED:
            number = self._wanting[0]
            transfer = self._coming[number]
            more = min(len(transfer.data) - transfer.granted, _MOST_GRANTED - self._granted)
            transfer.granted += more
            self._granted += more
            self._say(Kind.GRANT, number=number, value=transfer.granted)
            if transfer.granted == len(transfer.data):
                self._wanting.popleft()

    def _give(self, number: int, limit: int) -> None:
        """Send the requested data of a message, up to the offset `limit`."""
        transfer = self._offers.get(number)
        if transfer is None:
            return
        limit = min(limit, len(transfer.data))
        while transfer.moved < limit:
            end = min(limit, transfer.moved + FRAME)
            part = bytes(transfer.data[transfer.moved : end])
            self._say(Kind.DATA, number=number, value=transfer.moved, data=part)
            transfer.moved = end

    def _take(self, word: Word, data: memoryview) -> None:
        """Handle data of a message that have arrived."""
        transfer = self._coming.get(word.number)
        if transfer is None:
            return
        end = transfer.moved + len(data)
        if word.value != transfer.moved or end > transfer.granted:
            del self._coming[word.number]
            self._wanting = deque(number for number in self._wanting if number != word.number)
            transfer.end(TransportError(self._rank, "it has sent data that nobody asked for"))
            return
        transfer.data[transfer.moved : end] = data
        transfer.moved = end
        self._granted -= len(data)
        if end == len(transfer.data):
            del self._coming[word.number]
            self._say(Kind.DONE, number=word.number)
            transfer.end()
        self._grant()


def _first(waiting: dict[int, deque[_Waiting]], tag: int) -> _Waiting | None:
    """Remove and return the oldest item with this tag; None if there is none."""
    found = waiting.get(tag)
    if not found:
        return None
    first = found.popleft()
    if not found:
        del waiting[tag]
    return first
