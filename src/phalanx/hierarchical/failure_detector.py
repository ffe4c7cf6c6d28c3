"""Detection of lost ranks on neighbouring hosts, even while no operation needs them.

Each rank posts a receive of one byte from its counterparts on the next and the previous host. The
byte is never sent, so the receive ends only when the connection is closed. The rank that detects
this breaks the group of its host. The failure thereby reaches every host, even ranks that wait in
memory for a rank that itself waits for another rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.hierarchical import tags
from phalanx.hierarchical.transfers import ConnectionLost
from phalanx.transports import TransportError

if TYPE_CHECKING:
    from phalanx.hierarchical.failure_propagation import FailurePropagator
    from phalanx.topology import Layout
    from phalanx.transports import Transfer, Transport

__all__ = ["counterparts", "watch_counterparts"]


def watch_counterparts(layout: Layout, transport: Transport, propagator: FailurePropagator) -> None:
    """Break the group if a counterpart of this rank ends without having left the group."""
    for peer in counterparts(layout):
        _watch_peer(peer, transport, propagator)


def counterparts(layout: Layout) -> list[int]:
    """Return the ranks that this rank watches.

    Every rank of a neighbouring host is watched by a rank of this host.
    """
    hosts = len(layout.hosts)
    neighbours = {(layout.host + 1) % hosts, (layout.host - 1) % hosts} - {layout.host}
    peers = set()
    for host in neighbours:
        theirs, ours = layout.hosts[host], len(layout.ranks)
        for number in range(max(ours, len(theirs))):
            if number % ours == layout.local_rank:
                peers.add(theirs[number % len(theirs)])
    return sorted(peers)


def _watch_peer(peer: int, transport: Transport, propagator: FailurePropagator) -> None:
    def handle_end() -> None:
        try:
            transfer.wait(0)
        except TransportError as error:
            propagator.handle_connection_lost(ConnectionLost(peer, error))

    try:
        transfer: Transfer = transport.recv(memoryview(bytearray(1)), peer, tags.LIVENESS)
    except TransportError as error:
        propagator.handle_connection_lost(ConnectionLost(peer, error))
    else:
        transfer.add_done_callback(handle_end)
