"""The transport of PyTorch's Gloo: TCP between any two ranks.

Gloo cannot test whether a transfer has completed, and a wait that times out closes all connections
of the process. So threads wait without a timeout on behalf of callers that have one. To abort the
transport, such a timeout is caused deliberately; peers then find their connections closed. A
connection is made with the first post to a peer. This happens in a thread too, since the peer may
never answer.

After a timeout while a connection is being made, Gloo ends the process as soon as the connection is
made (`ex_ == nullptr`, in a thread of Gloo, torch 2.13). So two ranks start to connect only after
each has requested the connection in the store. That keeps the time of connecting short, and an
abort waits until it is over.

Until there is a connection, the peer may end unnoticed. So each rank listens on another port and
accepts no connection there. A rank that waits for a peer connects to this port. The peer's kernel
keeps the connection until the peer stops listening or its process ends.

A connection that is closed while it holds unread data drops its unsent data. So a rank that leaves
sends each peer a message on the connection itself, after all other data, and closes the connection
after the peer's acknowledgement.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import DistError, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from phalanx import env
from phalanx.errors import UsageError
from phalanx.system.polling import attempts
from phalanx.transports.interface import CompletableTransfer, Transfer, Transport, TransportError
from phalanx.transports.liveness import LivenessProbe, endpoint_of, listen
from phalanx.transports.shutdown_hooks import delay_shutdown

_gloo: Any = ProcessGroupGloo  # its type stub is incomplete
# Never reached: the waits for transfers have timeouts of their own.
_NO_TIMEOUT = timedelta(days=365)
_CONNECT_TIMEOUT = timedelta(seconds=60)
"""The time for which Gloo waits for a peer that has requested a connection too.

A peer that dies in that moment never makes it, and Gloo's wait cannot be ended otherwise. Transfers
do not wait with it.
"""
_MIN_TIMEOUT = timedelta(milliseconds=1)
_ABORT_TAG = 2**31 - 1
_LEAVE_TAG = 2**31 - 3
_LEAVE, _LEAVE_ACK = 1, 2
_LEAVE_SECONDS = 2.0
_CONNECTING_SECONDS = 0.5
"""Seconds within which a requested connection is made, unless a rank has stopped or died."""
_CONNECT_KEY = "{}/wants/{}"
"""Key in the store by which a rank requests a connection with a peer."""
_LIVENESS_KEY = "{}/alive"
"""Key with the endpoint of a rank, its port and address; empty once the rank has left."""
_MAX_PAUSE = 0.1
"""The longest time between two checks whether a peer requests a connection, in seconds."""
_ABORTED = "this rank has closed its connections"


class _WaitThreads:
    """A pool of threads that wait inside Gloo, one for each concurrent wait."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], None]) -> None:
        """Call a function in an idle thread, or in a new one if there is none."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._run, name="phalanx-gloo", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._calls.put(call)

    def stop(self, seconds: float) -> None:
        """End the threads after their waits; block for up to `seconds`.

        A thread that returns from Gloo to an ending interpreter would abort the process.
        """
        with self._lock:
            threads = list(self._threads)
            for _ in threads:
                self._calls.put(None)
        end = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            with delay_shutdown():
                call()
            del call
            with self._lock:
                self._idle += 1


class _GlooTransfer(CompletableTransfer):
    """A transfer that completes once a thread has waited for its work object, on request."""

    def __init__(self, peer: int, wait_threads: _WaitThreads) -> None:
        super().__init__(wait_threads.submit)
        self.peer = peer
        self._work: Any = None
        self._wait_requested = False

    def set_work(self, work: Any) -> None:
        """Set the work object that Gloo returned for this transfer."""
        with self._lock:
            self._work = work
            wait_requested = self._wait_requested
        if wait_requested:
            self._schedule(self._wait)

    def wait(self, timeout: float) -> bool:
        self._request_wait()
        return super().wait(timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        super().add_done_callback(callback)
        self._request_wait()

    def _request_wait(self) -> None:
        """Let a thread wait for the transfer, as soon as Gloo has it."""
        with self._lock:
            start = not self._wait_requested and self._work is not None
            self._wait_requested = True
        if start:
            self._schedule(self._wait)

    def _wait(self) -> None:
        error: TransportError | None = None
        try:
            self._work.wait(_NO_TIMEOUT)
        except RuntimeError as reason:
            error = TransportError(self.peer, _reason(reason))
        self._work = None
        if (callback := self._finish(error)) is not None:
            callback()  # here, since this thread may block


class _PeerConnection:
    """The state of the connection to a peer, with the transfers that wait for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_connected = False
        self.is_requested = False
        """True once a transfer was posted to the peer."""
        self.is_started = False
        """True once Gloo is making the connection or has made it."""
        self.pending: deque[tuple[Callable[[], Any], _GlooTransfer]] = deque()
        """The posts that wait for the connection, with their transfers, in order."""
        self.failure = ""
        """The reason why there will be no connection; empty if there may be one."""
        self.endpoint = ""
        """The peer's endpoint for a `LivenessProbe`, once Gloo makes the connection."""
        self.resolved = threading.Event()
        """Set when the connection is made or has failed."""
        self.may_close = threading.Event()
        """Set when the peer has received all sent data, or is gone."""


class GlooTransport(Transport):
    """A rank's end of Gloo; see `open_transport` for the arguments."""

    def __init__(self, store: Store, rank: int, size: int, address: str) -> None:
        _check_not_advertised()
        options = _gloo._Options()
        options._timeout = _CONNECT_TIMEOUT
        options._threads = 1
        try:
            device = _gloo.create_device(hostname=address, lazy_init=True)
            options._devices = [device]
            self._group: Any = _gloo(store, rank, size, options)
            # Other ranks detect the end of this rank by this port, where it accepts no connection.
            self._liveness = listen(address)
        except (OSError, RuntimeError) as error:
            raise TransportError(-1, f"Gloo cannot listen on {address}: {_reason(error)}") from None
        self._store, self._rank = store, rank
        self._wait_threads = _WaitThreads()
        self._connections = [_PeerConnection() for _ in range(size)]
        self._sent_messages: list[object] = []  # buffers that Gloo may still read
        self._is_aborted = False
        store.set(_LIVENESS_KEY.format(rank), endpoint_of(self._liveness))

    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post("send", data, peer, tag)

    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post("recv", data, peer, tag)

    def abort(self) -> None:
        if self._is_aborted:
            return
        self._is_aborted = True
        self._wait_for_connections(time.monotonic() + _CONNECTING_SECONDS)
        # One time-out closes all connections, but a receive on a closed one does not time out.
        for peer in [peer for peer, each in enumerate(self._connections) if each.is_connected]:
            with contextlib.suppress(RuntimeError):
                self._group.recv(
                    [torch.empty(1, dtype=torch.float32, device="cpu")], peer, _ABORT_TAG
                ).wait(_MIN_TIMEOUT)
        for connection in self._connections:
            self._fail_pending(connection, -1, _ABORTED)
        self._liveness.close()

    def close(self) -> None:
        if not self._is_aborted:
            self._leave()
            with contextlib.suppress(DistError, RuntimeError):
                self._store.set(_LIVENESS_KEY.format(self._rank), "")
        self.abort()  # otherwise an unanswered receive would keep the connections open
        # A thread that waits for a peer which will not make the connection returns later.
        is_stuck = any(each.is_started and not each.resolved.is_set() for each in self._connections)
        self._wait_threads.stop(0.0 if is_stuck else _LEAVE_SECONDS)
        self._group = None

    def _post(self, name: str, data: memoryview, peer: int, tag: int) -> Transfer:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        transfer, connection = _GlooTransfer(peer, self._wait_threads), self._connections[peer]
        with connection.lock:
            group = self._group
            if self._is_aborted or group is None:
                raise TransportError(peer, _ABORTED)
            if connection.failure:
                raise TransportError(peer, connection.failure)
            post = partial(getattr(group, name), [tensor], peer, tag)
            if connection.is_connected:
                self._start(post, transfer)
            else:
                connection.pending.append((post, transfer))
                if not connection.is_requested:
                    connection.is_requested = True
                    self._wait_threads.submit(lambda: self._connect(connection, peer))
        return transfer

    def _connect(self, connection: _PeerConnection, peer: int) -> None:
        """Connect with a peer once both have requested it, and post the pending transfers.

        Then serve the connection's leave messages until the connection is closed.
        """
        message = torch.zeros(1, dtype=torch.uint8, device="cpu")
        try:
            if not self._wait_for_peer(peer):
                return
            endpoint = self._liveness_endpoint(peer)
            with connection.lock:
                if self._is_aborted:
                    return
                connection.is_started, connection.endpoint = True, endpoint
            self._wait_threads.submit(partial(self._watch_connecting, connection, peer))
            leave_receive = self._group.recv([message], peer, _LEAVE_TAG)
        except (AttributeError, DistError, RuntimeError) as error:
            self._give_up(connection, peer, _reason(error))
            connection.resolved.set()
            return
        with connection.lock:
            connection.is_connected = True
            while connection.pending and not self._is_aborted:
                self._start(*connection.pending.popleft())
            connection.resolved.set()
        self._serve_leave_messages(connection, peer, message, leave_receive)

    def _wait_for_peer(self, peer: int) -> bool:
        """Block until the peer requests the connection; return False if this rank aborts before.

        Raises:
            RuntimeError: The peer has left, or its process has ended.
        """
        self._store.set(_CONNECT_KEY.format(self._rank, peer), "")
        probe: LivenessProbe | None = None
        try:
            for _ in attempts(longest=_MAX_PAUSE):
                if self._is_aborted:
                    break
                if self._store.check([_CONNECT_KEY.format(peer, self._rank)]):
                    return True
                if probe is None and self._store.check([_LIVENESS_KEY.format(peer)]):
                    probe = LivenessProbe(self._liveness_endpoint(peer))
                if probe is not None and (reason := probe.detect_failure()):
                    self._liveness_endpoint(peer)
                    raise RuntimeError(reason)
        finally:
            if probe is not None:
                probe.close()
        return False

    def _liveness_endpoint(self, peer: int) -> str:
        """Return the peer's endpoint for a `LivenessProbe`; raise RuntimeError if it has left."""
        if endpoint := self._store.get(_LIVENESS_KEY.format(peer)).decode():
            return str(endpoint)
        raise RuntimeError("it has left")

    def _wait_for_connections(self, end: float) -> None:
        """Block until no connection is being made, or until `end` on the monotonic clock."""
        for connection in self._connections:
            with connection.lock:
                is_started = connection.is_started
            if is_started:
                _wait_until_connected(connection, end)

    def _watch_connecting(self, connection: _PeerConnection, peer: int) -> None:
        """Fail the transfers that wait for a connection if the peer ends before it is made."""
        reason = _wait_until_connected(connection, math.inf)
        # The peer may have ended just after it had made the connection.
        if reason and not connection.resolved.wait(_MAX_PAUSE):
            self._give_up(connection, peer, reason)

    def _give_up(self, connection: _PeerConnection, peer: int, reason: str) -> None:
        with connection.lock:
            connection.failure = connection.failure or reason
        self._fail_pending(connection, peer, connection.failure)

    @staticmethod
    def _fail_pending(connection: _PeerConnection, peer: int, reason: str) -> None:
        """Fail the transfers that wait for a connection."""
        with connection.lock:
            pending = list(connection.pending)
            connection.pending.clear()
        for _, transfer in pending:
            transfer.complete(TransportError(peer, reason))

    def _leave(self) -> None:
        """Wait, for 2 s at most, until all peers have received the data sent to them.

        This includes peers that have not requested the connection yet.
        """
        end = time.monotonic() + _LEAVE_SECONDS
        for connection in self._connections:
            if connection.is_requested:
                connection.resolved.wait(max(0.0, end - time.monotonic()))
        connected = [
            (peer, each) for peer, each in enumerate(self._connections) if each.is_connected
        ]
        for peer, _ in connected:
            self._send_leave_message(peer, _LEAVE)
        for _, connection in connected:
            connection.may_close.wait(max(0.0, end - time.monotonic()))

    def _serve_leave_messages(
        self, connection: _PeerConnection, peer: int, message: torch.Tensor, leave_receive: Any
    ) -> None:
        """Receive leave messages and acknowledge them, until the connection is closed."""
        try:
            while True:
                leave_receive.wait(_NO_TIMEOUT)
                if message.item() == _LEAVE:
                    self._send_leave_message(peer, _LEAVE_ACK)
                else:
                    connection.may_close.set()
                leave_receive = self._group.recv([message], peer, _LEAVE_TAG)
        except (AttributeError, RuntimeError):  # closed, here or by the peer
            connection.may_close.set()

    def _send_leave_message(self, peer: int, message: int) -> None:
        with contextlib.suppress(AttributeError, RuntimeError):
            data = torch.tensor([message], dtype=torch.uint8, device="cpu")
            self._sent_messages.append((data, self._group.send([data], peer, _LEAVE_TAG)))

    @staticmethod
    def _start(post: Callable[[], Any], transfer: _GlooTransfer) -> None:
        try:
            transfer.set_work(post())
        except RuntimeError as error:
            transfer.complete(TransportError(transfer.peer, _reason(error)))


def _wait_until_connected(connection: _PeerConnection, end: float) -> str:
    """Block until the connection is made or has failed, the peer has ended, or until `end`.

    Returns:
        The sign of the peer's end; empty if there is none.
    """
    probe, reason = LivenessProbe(connection.endpoint), ""
    try:
        for _ in attempts(end, longest=_MAX_PAUSE):
            if connection.resolved.is_set() or (reason := probe.detect_failure()):
                break
    finally:
        probe.close()
    return reason


def _check_not_advertised() -> None:
    """Check that no advertised address is set.

    Gloo publishes the address on which it listens, and decides by these addresses which of two
    ranks connects.
    """
    try:
        host, _ = env.advertised_address()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if host:
        raise UsageError(
            "PHALANX_ADVERTISE_ADDR is set, but the transport gloo needs hosts that reach each "
            "other at their own addresses: use the transport relay (PHALANX_TRANSPORT=relay), or "
            "unset the variable"
        )


def _reason(error: Exception) -> str:
    """Return Gloo's error message without its source location."""
    text = str(error).partition("\n")[0]
    return text.partition("] ")[2] if text.startswith("[/") else text
