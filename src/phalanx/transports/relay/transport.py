"""The relay transport of one group."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.transports.interface import Transfer, Transport, TransportError
from phalanx.transports.relay import discovery
from phalanx.transports.relay.frames import Ending, Kind, Word
from phalanx.transports.relay.peer import Peer

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

__all__ = ["RelayTransport"]

_PARTING_SECONDS = 2.0
_LOOK = 0.001
_ABORTED = "this rank has closed its connections"
_ENDINGS = {
    Ending.DIED: "its connection to the relay is gone",
    Ending.CLOSED: "it has closed its connection",
    Ending.ABORTED: "it has closed its connections",
}


class RelayTransport(Transport):
    """A rank's end of the relay; see `open_transport` for the arguments."""

    def __init__(self, store: Store, rank: int, size: int, address: str) -> None:
        self._rank = rank
        self._place = discovery.find(store, rank, address)
        self._line, channel = self._place.line, self._place.channel
        self._channel = channel
        self._peers = [Peer(peer, channel, self._line) for peer in range(size)]
        self._left = False
        self._line.add(channel, self)  # before any peer can send to it
        self._line.say(Word(Kind.ENTER, channel, rank))

    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._peers[peer].send(data, tag)

    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._peers[peer].recv(data, tag)

    def abort(self) -> None:
        self._leave(Ending.ABORTED)

    def close(self) -> None:
        end = time.monotonic() + _PARTING_SECONDS
        while not all(peer.idle for peer in self._peers) and time.monotonic() < end:
            time.sleep(_LOOK)
        self._leave(Ending.CLOSED)
        discovery.leave(self._place, self._rank)

    def heard(self, word: Word, data: memoryview) -> None:
        """Handle a word of the group's channel; called in the line's thread."""
        if not 0 <= word.peer < len(self._peers):
            return
        if word.kind is Kind.GONE:
            reason = _ENDINGS[Ending(word.value)]
            self._peers[word.peer].lose(TransportError(word.peer, reason))
        else:
            self._peers[word.peer].heard(word, data)

    def cut(self, reason: str) -> None:
        """Fail all transfers: the relay is gone, and all peers with it."""
        for peer in self._peers:
            peer.lose(TransportError(self._place.host, f"the relay: {reason}"))

    def _leave(self, how: Ending) -> None:
        if self._left:
            return
        self._left = True
        self._line.say(Word(Kind.LEAVE, self._channel, self._rank, value=how))
        for peer in self._peers:
            peer.lose(TransportError(-1, _ABORTED))
