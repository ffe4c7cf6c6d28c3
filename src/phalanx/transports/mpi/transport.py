"""The MPI transport of one group, with its transfers.

The MPI thread (see `progress_thread`) owns all pending transfers, and other threads pass their
calls to it, so the transport needs no lock. MPI does not report the end of a process. A rank that
leaves or aborts sends a message to all peers that it knows. If a rank dies, `mpirun` ends the
others.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from phalanx.transports.interface import (
    CallbackThread,
    CompletableTransfer,
    TagQueues,
    Transfer,
    Transport,
    TransportError,
)
from phalanx.transports.mpi.messages import MAX_EAGER_BYTES, Communicator, Kind, Message
from phalanx.transports.mpi.progress_thread import MpiProgressThread

_DRAIN_SECONDS = 2.0
"""Seconds that a leaving rank waits for its peers to receive what it has sent."""
_CLOSE_SECONDS = 2.0
"""Seconds that data in flight have to arrive when the transport is closed."""
_MIN_PAUSE, _MAX_PAUSE = 0.0005, 0.05
"""Seconds between two checks of the store for the processes of peers: shortest and longest."""
_CLOSED = "this rank has closed its connections"
_PEER_CLOSED = "it has closed its connections"
_UNKNOWN = -1


class MpiTransport(Transport):
    """A rank's end of MPI; see `open_transport` for the other arguments.

    Args:
        mpi_thread: The MPI thread of this process.

    Raises:
        TransportError: The group has more ranks than `mpirun` has started processes.
    """

    def __init__(self, mpi_thread: MpiProgressThread, store: Store, rank: int, size: int) -> None:
        if mpi_thread.size < size:
            raise TransportError(
                -1,
                f"the group has {size} ranks, but MPI has {mpi_thread.size} "
                f"process{'es' * (mpi_thread.size > 1)}: start all ranks with one mpirun, as in "
                f"`mpirun -n {size} python script.py`",
            )
        self._mpi_thread, self._store, self._rank = mpi_thread, store, rank
        name = int(store.compare_set("name", "", secrets.token_hex(7)), 16)
        store.set(_key(rank), f"{mpi_thread.communicator.name} {mpi_thread.rank}")
        self._name = name
        self._callback_thread = CallbackThread("phalanx-mpi-callbacks")
        self._peers = [
            _Peer(mpi_thread.communicator, name, rank, partial(self._look_up, peer))
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
        self, post: Callable[[_MpiTransfer], None], data: memoryview, peer: int, tag: int
    ) -> Transfer:
        if self._is_closing or self._mpi_thread.stop_reason:
            raise TransportError(peer, self._mpi_thread.stop_reason or _CLOSED)
        transfer = _MpiTransfer(data, peer, tag, self._callback_thread)
        self._mpi_thread.submit(partial(post, transfer))
        return transfer

    def _drain(self) -> None:
        """Wait, for 2 s at most, until peers have received the data sent to them."""
        end = time.monotonic() + _DRAIN_SECONDS
        answer: queue.SimpleQueue[list[_MpiTransfer]] = queue.SimpleQueue()
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
                # MPI still refers to memory that its owners reuse.
                self._mpi_thread.stop_reason = (
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
            peer.close()
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


def _key(rank: int) -> str:
    return f"rank/{rank}"


class _Peer:
    """Another rank of the group, as seen by this rank; only for the MPI thread.

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
        self._queued_sends: deque[_MpiTransfer] = deque()  # until the peer's process is known
        self._offer_count = 0
        self._offered_sends: dict[int, _MpiTransfer] = {}
        self._posted_receives = TagQueues[_MpiTransfer]()
        self._unexpected_messages = TagQueues[Message]()
        # MPI holds the buffers of these:
        self._active_sends: list[_MpiTransfer] = []
        self._active_receives: list[_MpiTransfer] = []

    @property
    def pending_sends(self) -> list[_MpiTransfer]:
        """The sends that have not completed yet."""
        return [*self._queued_sends, *self._offered_sends.values(), *self._active_sends]

    def send(self, transfer: _MpiTransfer) -> None:
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

    def recv(self, transfer: _MpiTransfer) -> None:
        """Start a receive, after all receives posted before."""
        if self._close_reason:
            transfer.finish(self._close_reason)
            return
        if (message := self._unexpected_messages.pop_oldest(transfer.tag)) is not None:
            self._match(transfer, message)
        elif self._gone_reason:
            transfer.finish(self._gone_reason)
        else:
            self._posted_receives.append(transfer.tag, transfer)
            if self._process == _UNKNOWN:
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
            transfer = self._posted_receives.pop_oldest(message.tag)
            if transfer is None:
                self._unexpected_messages.append(message.tag, message)
            else:
                self._match(transfer, message)

    def disconnect(self, reason: str) -> None:
        """Fail all transfers except those that MPI holds: the peer is gone."""
        self._gone_reason = reason
        self._unexpected_messages.keep_while(lambda message: message.kind is Kind.EAGER)
        self._fail_unstarted(reason)

    def close(self) -> None:
        """Fail all transfers except those that MPI holds: this rank's transport is closed."""
        self._close_reason = _CLOSED
        self._unexpected_messages.remove_all()
        self._fail_unstarted(_CLOSED)

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

    def _match(self, transfer: _MpiTransfer, message: Message) -> None:
        """Handle the match of a receive with a message."""
        size = message.size or len(message.payload)
        if size != transfer.data.nbytes:
            transfer.finish(f"it sends {size} B, but {transfer.data.nbytes} B are expected")
        elif message.kind is Kind.EAGER:
            transfer.data[:] = message.payload
            transfer.finish()
        else:
            self._request_data(transfer, message)

    def _request_data(self, transfer: _MpiTransfer, offer: Message) -> None:
        """Request the data of an offer; they arrive directly in the buffer of the receive."""
        self._active_receives.append(transfer)
        done = partial(self._finish, self._active_receives, transfer)
        tag = self._communicator.receive_data(self._process, transfer.data, done)
        self._send_message(Kind.REQUEST, tag, offer.number)

    def _send_data(self, request: Message) -> None:
        """Send the data of an offer, or CANCELLED if the offer was withdrawn."""
        transfer = self._offered_sends.pop(request.number, None)
        if transfer is None:
            self._send_message(Kind.CANCELLED, request.tag)
            return
        self._active_sends.append(transfer)
        done = partial(self._finish, self._active_sends, transfer)
        self._communicator.send_data(self._process, transfer.data, request.tag, done)

    def _finish(self, active: list[_MpiTransfer], transfer: _MpiTransfer, completed: bool) -> None:
        """Finish a transfer that MPI no longer holds."""
        active.remove(transfer)
        transfer.finish("" if completed else self._gone_reason or _PEER_CLOSED)

    def _fail_unstarted(self, reason: str) -> None:
        """Fail all transfers that MPI does not hold."""
        posted = self._posted_receives.remove_all()
        for transfer in (*self._queued_sends, *self._offered_sends.values(), *posted):
            transfer.finish(reason)
        self._queued_sends.clear()
        self._offered_sends.clear()

    def _send_message(
        self, kind: Kind, tag: int = 0, number: int = 0, size: int = 0, payload: bytes = b""
    ) -> None:
        message = Message(self._transport, kind, self._rank, tag, number, size, payload)
        self._communicator.send_message(self._process, message)


class _MpiTransfer(CompletableTransfer):
    """A transfer to or from a rank under a tag, which the MPI thread completes."""

    def __init__(self, data: memoryview, peer: int, tag: int, callbacks: CallbackThread) -> None:
        super().__init__(callbacks.submit)
        self.data, self.peer, self.tag = data, peer, tag

    def finish(self, reason: str = "") -> None:
        """Complete the transfer; it fails if there is a reason."""
        self.complete(TransportError(self.peer, reason) if reason else None)
