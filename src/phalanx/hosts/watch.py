"""Ranks of neighbouring hosts hear of each other's end, also while no operation needs it.

Each rank waits for a byte from its counterparts on the next host and on the one before, which
never comes: what comes is the end of the connection. Who hears it breaks the group of its host, and
so the news goes around, to ranks that wait in memory for one that waits for somebody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.engines import EngineError
from phalanx.hosts import tags
from phalanx.hosts.links import Gone

if TYPE_CHECKING:
    from phalanx.engines import Engine, Transfer
    from phalanx.hosts.failing import Failing
    from phalanx.topology import Layout

__all__ = ["counterparts", "watch"]


def watch(layout: Layout, engine: Engine, failing: Failing) -> None:
    """Have the group broken when a counterpart of this rank ends without having left."""
    for peer in counterparts(layout):
        _await(peer, engine, failing)


def counterparts(layout: Layout) -> list[int]:
    """Whom a rank watches: every rank of a neighbouring host is watched by one of this."""
    hosts = len(layout.hosts)
    neighbours = {(layout.host + 1) % hosts, (layout.host - 1) % hosts} - {layout.host}
    peers = set()
    for host in neighbours:
        theirs, ours = layout.hosts[host], len(layout.ranks)
        for number in range(max(ours, len(theirs))):
            if number % ours == layout.local_rank:
                peers.add(theirs[number % len(theirs)])
    return sorted(peers)


def _await(peer: int, engine: Engine, failing: Failing) -> None:
    def ended() -> None:
        try:
            transfer.wait(0)
        except EngineError as error:
            failing.lost(Gone(peer, error))

    try:
        transfer: Transfer = engine.recv(memoryview(bytearray(1)), peer, tags.WATCH)
    except EngineError as error:
        failing.lost(Gone(peer, error))
    else:
        transfer.then(ended)
