"""The MPI transport of one group.

The thread of MPI (see `world`) owns all pending transfers, and other threads pass their calls to
it, so nothing here needs a lock. MPI does not report the end of a process. A rank that leaves or
aborts tells all peers that it knows. If a rank dies, `mpirun` ends the others.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed import DistError

from phalanx.transports.interface import Transfer, Transport, TransportError
from phalanx.transports.mpi.peer import Peer
from phalanx.transports.mpi.protocol import Kind, Message
from phalanx.transports.mpi.transfer import Calls, MpiTransfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined]

    from phalanx.transports.mpi.messages import Wire
    from phalanx.transports.mpi.progress_thread import World

__all__ = ["MpiTransport"]

_PARTING_SECONDS = 2.0
"""Seconds that a leaving rank waits for its peers to receive what it has sent."""
_SETTLING_SECONDS = 2.0
"""Seconds that data in flight have to arrive when the transport ends."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
"""Seconds between two checks of the store for the processes of peers: shortest and longest."""
_ENDED = "this rank has ended its connections"


class MpiTransport(Transport):
    """A rank's end of MPI; see `open_transport` for the other arguments.

    Args:
        world: This process among those that `mpirun` has started.

    Raises:
        TransportError: The group has more ranks than `mpirun` has started processes.
    """

    def __init__(self, world: World, store: Store, rank: int, size: int) -> None:
        _check(world.size, size)
        self._world, self._store, self._rank = world, store, rank
        name = int(store.compare_set("name", "", secrets.token_hex(7)), 16)
        store.set(_key(rank), f"{world.wire.name} {world.rank}")
        self._name = name
        self._calls = Calls()
        self._peers = [
            Peer(world.wire, name, rank, partial(self._find, peer)) for peer in range(size)
        ]
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._finder: threading.Thread | None = None
        self._over = False
        self._deadline = 0.0
        self._settled = threading.Event()
        world.do(partial(world.join, name, self))

    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post(self._peers[peer].send, data, peer, tag)

    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post(self._peers[peer].recv, data, peer, tag)

    def abort(self) -> None:
        if not self._over:
            self._world.troubled = True
            self._end()

    def close(self) -> None:
        if not self._over:
            self._part()
            self._end()
        self._settled.wait(2 * _SETTLING_SECONDS)
        self._wanted.put(None)
        self._calls.stop(_PARTING_SECONDS)

    def _post(
        self, how: Callable[[MpiTransfer], None], data: memoryview, peer: int, tag: int
    ) -> Transfer:
        if self._over or self._world.stopped:
            raise TransportError(peer, self._world.stopped or _ENDED)
        transfer = MpiTransfer(data, peer, tag, self._calls)
        self._world.do(partial(how, transfer))
        return transfer

    def _part(self) -> None:
        """Wait, for 2 s at most, until peers have received what was sent to them."""
        end = time.monotonic() + _PARTING_SECONDS
        answer: queue.SimpleQueue[list[MpiTransfer]] = queue.SimpleQueue()
        self._world.do(lambda: answer.put([each for peer in self._peers for each in peer.sends]))
        try:
            for transfer in answer.get(timeout=_PARTING_SECONDS):
                transfer.wait(max(0.0, end - time.monotonic()))
        except (TransportError, queue.Empty):
            return  # a peer will never receive it

    def _end(self) -> None:
        self._over = True
        self._deadline = time.monotonic() + _SETTLING_SECONDS
        self._world.do(self._begin_to_end)

    # Called by the thread of MPI.

    def take(self, message: Message, source: int) -> None:
        """Handle a message for this transport."""
        self._peers[message.rank].take(message, source)

    def settle(self) -> bool:
        """Continue to end the transport, and return whether it has ended.

        It ends only after data in flight have arrived: MPI does not release their memory before.
        """
        settled = [peer.settle() for peer in self._peers]  # a list: every peer must be told
        if not all(settled):
            if time.monotonic() > self._deadline:
                self._world.stop(
                    "data from or to another rank never came to their end, so this process can't "
                    "use MPI any more"
                )
            return False
        self._settled.set()
        self._world.join(self._name, _Past(self._world.wire, self._name, self._rank))
        return True

    def fail(self, reason: str) -> None:
        """Fail all transfers: MPI cannot be used any more."""
        for peer in self._peers:
            peer.fail(reason)
        self._settled.set()

    def _begin_to_end(self) -> None:
        for peer in self._peers:
            peer.end(_ENDED)
        self._world.end(self)

    # Processes of the peers: each rank publishes its process in the store.

    def _find(self, peer: int) -> None:
        self._wanted.put(peer)
        if self._finder is None:
            self._finder = threading.Thread(
                target=self._look_for_peers, name="phalanx-mpi-finder", daemon=True
            )
            self._finder.start()

    def _look_for_peers(self) -> None:
        missing: list[int] = []
        pause = _SHORTEST_PAUSE
        while not self._over:
            try:
                peer = self._wanted.get(timeout=pause if missing else None)
                if peer is None:
                    return
                missing.append(peer)
                pause = _SHORTEST_PAUSE
            except queue.Empty:
                pause = min(2 * pause, _LONGEST_PAUSE)
            missing = [each for each in missing if not self._looked_for(each)]

    def _looked_for(self, rank: int) -> bool:
        """Look up the process of a rank; return False if it is not in the store yet."""
        peer = self._peers[rank]
        try:
            if not self._store.check([_key(rank)]):
                return False
            name, place = self._store.get(_key(rank)).decode().split()
        except (DistError, RuntimeError) as error:
            reason = f"the store can't say where it is: {str(error).partition(chr(10))[0]}"
            self._world.do(partial(peer.lose, reason))
            return True
        if name == self._world.wire.name:
            self._world.do(partial(peer.found, int(place)))
        else:
            reason = "it was started by another mpirun than this rank: start all with one"
            self._world.do(partial(peer.lose, reason))
        return True


class _Past:
    """A stand-in for an ended transport, which answers ranks that do not know of its end."""

    def __init__(self, wire: Wire, name: int, rank: int) -> None:
        self._wire, self._name, self._rank = wire, name, rank

    def take(self, message: Message, source: int) -> None:
        kind = {Kind.HELLO: Kind.GONE, Kind.ASK: Kind.REFUSED}.get(message.kind)
        if kind is not None:
            self._wire.tell(source, Message(self._name, kind, self._rank, message.tag))

    def settle(self) -> bool:
        return True

    def fail(self, reason: str) -> None:
        pass


def _check(processes: int, ranks: int) -> None:
    if processes < ranks:
        raise TransportError(
            -1,
            f"the group has {ranks} ranks, but MPI knows of {processes} "
            f"process{'es' * (processes > 1)}: start all ranks with one mpirun, as in "
            f"`mpirun -n {ranks} python script.py`",
        )


def _key(rank: int) -> str:
    return f"rank/{rank}"
