"""The MPI transport of one group.

The MPI thread (see `progress_thread`) owns all pending transfers, and other threads pass their
calls to it, so nothing here needs a lock. MPI does not report the end of a process. A rank that
leaves or aborts sends a message to all peers that it knows. If a rank dies, `mpirun` ends the
others.
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
from phalanx.transports.mpi.transfer import CallbackThread, MpiTransfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined]

    from phalanx.transports.mpi.messages import Communicator
    from phalanx.transports.mpi.progress_thread import MpiProgressThread

__all__ = ["MpiTransport"]

_DRAIN_SECONDS = 2.0
"""Seconds that a leaving rank waits for its peers to receive what it has sent."""
_CLOSE_SECONDS = 2.0
"""Seconds that data in flight have to arrive when the transport is closed."""
_MIN_PAUSE, _MAX_PAUSE = 0.0005, 0.05
"""Seconds between two checks of the store for the processes of peers: shortest and longest."""
_CLOSED = "this rank has closed its connections"


class MpiTransport(Transport):
    """A rank's end of MPI; see `open_transport` for the other arguments.

    Args:
        mpi_thread: The MPI thread of this process.

    Raises:
        TransportError: The group has more ranks than `mpirun` has started processes.
    """

    def __init__(self, mpi_thread: MpiProgressThread, store: Store, rank: int, size: int) -> None:
        _check_size(mpi_thread.size, size)
        self._mpi_thread, self._store, self._rank = mpi_thread, store, rank
        name = int(store.compare_set("name", "", secrets.token_hex(7)), 16)
        store.set(_key(rank), f"{mpi_thread.communicator.name} {mpi_thread.rank}")
        self._name = name
        self._callback_thread = CallbackThread()
        self._peers = [
            Peer(mpi_thread.communicator, name, rank, partial(self._look_up, peer))
            for peer in range(size)
        ]
        self._lookup_queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lookup_thread: threading.Thread | None = None
        self._is_closing = False
        self._deadline = 0.0
        self._closed = threading.Event()
        mpi_thread.submit(partial(mpi_thread.register, name, self))

    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post(self._peers[peer].send, data, peer, tag)

    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post(self._peers[peer].recv, data, peer, tag)

    def abort(self) -> None:
        if not self._is_closing:
            self._mpi_thread.has_failures = True
            self._begin_close()

    def close(self) -> None:
        if not self._is_closing:
            self._drain()
            self._begin_close()
        self._closed.wait(2 * _CLOSE_SECONDS)
        self._lookup_queue.put(None)
        self._callback_thread.stop(_DRAIN_SECONDS)

    def _post(
        self, post: Callable[[MpiTransfer], None], data: memoryview, peer: int, tag: int
    ) -> Transfer:
        if self._is_closing or self._mpi_thread.stop_reason:
            raise TransportError(peer, self._mpi_thread.stop_reason or _CLOSED)
        transfer = MpiTransfer(data, peer, tag, self._callback_thread)
        self._mpi_thread.submit(partial(post, transfer))
        return transfer

    def _drain(self) -> None:
        """Wait, for 2 s at most, until peers have received the data sent to them."""
        end = time.monotonic() + _DRAIN_SECONDS
        answer: queue.SimpleQueue[list[MpiTransfer]] = queue.SimpleQueue()
        self._mpi_thread.submit(
            lambda: answer.put([each for peer in self._peers for each in peer.pending_sends])
        )
        try:
            for transfer in answer.get(timeout=_DRAIN_SECONDS):
                transfer.wait(max(0.0, end - time.monotonic()))
        except (TransportError, queue.Empty):
            return  # a peer will never receive them

    def _begin_close(self) -> None:
        self._is_closing = True
        self._deadline = time.monotonic() + _CLOSE_SECONDS
        self._mpi_thread.submit(self._close_peers)

    # Called by the MPI thread.

    def handle_message(self, message: Message, source: int) -> None:
        """Handle a message for this transport."""
        self._peers[message.rank].handle_message(message, source)

    def advance_shutdown(self) -> bool:
        """Continue the shutdown of the transport, and return whether it is complete.

        It completes only after data in flight have arrived: MPI does not release their memory
        before.
        """
        completed = [peer.advance_shutdown() for peer in self._peers]  # a list: calls it on each
        if not all(completed):
            if time.monotonic() > self._deadline:
                self._mpi_thread.stop(
                    "a transfer with another rank never completed, so this process can no longer "
                    "use MPI"
                )
            return False
        self._closed.set()
        self._mpi_thread.register(
            self._name, _ClosedTransport(self._mpi_thread.communicator, self._name, self._rank)
        )
        return True

    def fail(self, reason: str) -> None:
        """Fail all transfers: MPI cannot be used any more."""
        for peer in self._peers:
            peer.fail(reason)
        self._closed.set()

    def _close_peers(self) -> None:
        for peer in self._peers:
            peer.close(_CLOSED)
        self._mpi_thread.begin_shutdown(self)

    # Processes of the peers: each rank publishes its process in the store.

    def _look_up(self, peer: int) -> None:
        self._lookup_queue.put(peer)
        if self._lookup_thread is None:
            self._lookup_thread = threading.Thread(
                target=self._run_lookups, name="phalanx-mpi-lookup", daemon=True
            )
            self._lookup_thread.start()

    def _run_lookups(self) -> None:
        missing: list[int] = []
        pause = _MIN_PAUSE
        while not self._is_closing:
            try:
                peer = self._lookup_queue.get(timeout=pause if missing else None)
                if peer is None:
                    return
                missing.append(peer)
                pause = _MIN_PAUSE
            except queue.Empty:
                pause = min(2 * pause, _MAX_PAUSE)
            missing = [each for each in missing if not self._try_lookup(each)]

    def _try_lookup(self, rank: int) -> bool:
        """Look up the process of a rank; return False if it is not in the store yet."""
        peer = self._peers[rank]
        try:
            if not self._store.check([_key(rank)]):
                return False
            name, process = self._store.get(_key(rank)).decode().split()
        except (DistError, RuntimeError) as error:
            reason = f"the store did not return its process: {str(error).partition(chr(10))[0]}"
            self._mpi_thread.submit(partial(peer.disconnect, reason))
            return True
        if name == self._mpi_thread.communicator.name:
            self._mpi_thread.submit(partial(peer.set_process, int(process)))
        else:
            reason = "it was started by another mpirun than this rank: start all ranks with one"
            self._mpi_thread.submit(partial(peer.disconnect, reason))
        return True


class _ClosedTransport:
    """A stand-in for an ended transport, which answers ranks that do not know of its end."""

    def __init__(self, communicator: Communicator, name: int, rank: int) -> None:
        self._communicator, self._name, self._rank = communicator, name, rank

    def handle_message(self, message: Message, source: int) -> None:
        kind = {Kind.HELLO: Kind.CLOSED, Kind.REQUEST: Kind.CANCELLED}.get(message.kind)
        if kind is not None:
            self._communicator.send_message(
                source, Message(self._name, kind, self._rank, message.tag)
            )

    def advance_shutdown(self) -> bool:
        return True

    def fail(self, reason: str) -> None:
        pass


def _check_size(processes: int, ranks: int) -> None:
    if processes < ranks:
        raise TransportError(
            -1,
            f"the group has {ranks} ranks, but MPI has {processes} "
            f"process{'es' * (processes > 1)}: start all ranks with one mpirun, as in "
            f"`mpirun -n {ranks} python script.py`",
        )


def _key(rank: int) -> str:
    return f"rank/{rank}"
