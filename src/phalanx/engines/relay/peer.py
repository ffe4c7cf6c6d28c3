"""What this rank and one other send each other."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from phalanx.engines.announced import Announced
from phalanx.engines.interface import EngineError
from phalanx.engines.relay.sockets import FRAME
from phalanx.engines.relay.words import Kind, Word

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.engines.interface import Transfer
    from phalanx.engines.relay.line import Line

__all__ = ["Peer"]

_Waiting = TypeVar("_Waiting")

_SMALL = 32 * 2**10
"""Up to this size a message's data come with it, unasked."""
_MOST_SMALL = 2**20
"""Bytes of small messages that may be on their way to, or wait at, one receiver."""
_MOST_GRANTED = 4 * 2**20
"""Bytes of others that may be on their way."""


class _RelayTransfer(Announced):
    """Either side's."""

    def __init__(self, data: memoryview, call: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(data, call)
        self.moved = self.granted = 0


class _Message:
    """One that has come before its recv: with its data, or with a number to ask for them."""

    def __init__(self, size: int, number: int, data: bytes | None) -> None:
        self.size = size
        self.number = number
        self.data = data


class Peer:
    """The other rank, as this one sees it.

    Args:
        rank: In the group.
        channel: The group's.
        line: To the relay.
    """

    def __init__(self, rank: int, channel: bytes, line: Line) -> None:
        self._rank, self._channel, self._line = rank, channel, line
        self._lock = threading.Lock()
        self._sought = self._there = False
        self._gone: EngineError | None = None
        self._unsaid: deque[tuple[Word, bytes]] = deque()
        self._numbers = itertools.count()
        self._small = 0  # bytes of small messages that it hasn't taken
        self._offers: dict[int, _RelayTransfer] = {}
        self._awaited: dict[int, deque[_RelayTransfer]] = {}
        self._arrived: dict[int, deque[_Message]] = {}
        self._coming: dict[int, _RelayTransfer] = {}
        self._wanting: deque[int] = deque()  # of those that come: not all of it is granted
        self._granted = 0

    @property
    def idle(self) -> bool:
        """Whether nothing that was sent to it is still under way."""
        with self._lock:
            return not self._offers and not self._unsaid

    def send(self, data: memoryview, tag: int) -> Transfer:
        """Post a send."""
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
        """Post a receive."""
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
        """It, or the relay about it, has said something."""
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
                wrong = EngineError(self._rank, "it expects another size than was sent")
                error = wrong if word.kind is Kind.REFUSE else None
                self._offers.pop(word.number).end(error)

    def lose(self, error: EngineError) -> None:
        """It, or the way to it, is gone: nothing under way can end well."""
        with self._lock:
            if self._gone is not None:
                return
            self._gone = error
            # What has come is still there to be received.
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
            raise EngineError(self._gone.peer, str(self._gone))

    def _seek(self) -> None:
        """Have the relay say whether it is there, and when it is gone."""
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
        """A message has met its recv."""
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
            transfer.end(EngineError(self._rank, words))

    def _grant(self) -> None:
        """Ask for data, oldest message first, as much as may be on its way."""
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
        """Send data that were asked for."""
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
        """Data have come."""
        transfer = self._coming.get(word.number)
        if transfer is None:
            return
        end = transfer.moved + len(data)
        if word.value != transfer.moved or end > transfer.granted:
            del self._coming[word.number]
            self._wanting = deque(number for number in self._wanting if number != word.number)
            transfer.end(EngineError(self._rank, "it has sent data that nobody asked for"))
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
    """Take the oldest that has this tag, if any has."""
    found = waiting.get(tag)
    if not found:
        return None
    first = found.popleft()
    if not found:
        del waiting[tag]
    return first
