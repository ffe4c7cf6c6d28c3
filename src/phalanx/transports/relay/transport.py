"""The relay transport of one group."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.transports.interface import Transfer, Transport, TransportError
from phalanx.transports.relay import discovery
from phalanx.transports.relay.frames import Frame, Kind, LeaveReason
from phalanx.transports.relay.peer import Peer

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

__all__ = ["RelayTransport"]

_DRAIN_SECONDS = 2.0
_POLL_SECONDS = 0.001
_ABORTED = "this rank has closed its connections"
_LEAVE_REASONS = {
    LeaveReason.DIED: "its connection to the relay is gone",
    LeaveReason.CLOSED: "it has closed its connection",
    LeaveReason.ABORTED: "it has closed its connections",
}


class RelayTransport(Transport):
    """A rank's end of the relay; see `open_transport` for the arguments."""

    def __init__(self, store: Store, rank: int, size: int, address: str) -> None:
        self._rank = rank
        self._access = discovery.connect(store, rank, address)
        self._connection, channel = self._access.connection, self._access.channel
        self._channel = channel
        self._peers = [Peer(peer, channel, self._connection) for peer in range(size)]
        self._has_left = False
        self._connection.add_listener(channel, self)  # before any peer can send to it
        self._connection.send(Frame(Kind.JOIN, channel, rank))

    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._peers[peer].send(data, tag)

    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._peers[peer].recv(data, tag)

    def abort(self) -> None:
        self._leave(LeaveReason.ABORTED)

    def close(self) -> None:
        end = time.monotonic() + _DRAIN_SECONDS
        while not all(peer.is_idle for peer in self._peers) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        self._leave(LeaveReason.CLOSED)
        discovery.disconnect(self._access, self._rank)

    def handle_frame(self, frame: Frame, data: memoryview) -> None:
        """Handle a frame of the group's channel; called in the connection's thread."""
        if not 0 <= frame.peer < len(self._peers):
            return
        if frame.kind is Kind.GONE:
            reason = _LEAVE_REASONS[LeaveReason(frame.value)]
            self._peers[frame.peer].disconnect(TransportError(frame.peer, reason))
        else:
            self._peers[frame.peer].handle_frame(frame, data)

    def handle_disconnect(self, reason: str) -> None:
        """Fail all transfers: the relay is gone, and all peers with it."""
        for peer in self._peers:
            peer.disconnect(TransportError(self._access.host_rank, f"the relay: {reason}"))

    def _leave(self, reason: LeaveReason) -> None:
        if self._has_left:
            return
        self._has_left = True
        self._connection.send(Frame(Kind.LEAVE, self._channel, self._rank, value=reason))
        for peer in self._peers:
            peer.disconnect(TransportError(-1, _ABORTED))
