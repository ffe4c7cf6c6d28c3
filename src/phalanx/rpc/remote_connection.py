"""Connections to workers on other hosts: encrypted ZeroMQ sockets with locks and size limits.

Nothing that an unauthenticated peer sends reaches this package (`phalanx.system.curve`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

import zmq

from phalanx.key import derive
from phalanx.rpc.message import MAX_FRAME_SIZE, Frames
from phalanx.system import curve

_LINGER = 2_000
"""Milliseconds that sent messages have to go out after a socket is closed."""
_HEARTBEAT_MILLISECONDS = 1_000
_HEARTBEAT_TIMEOUT_MILLISECONDS = 5_000
_DRAIN_MILLISECONDS = 100
_MAX_COPIED = 64 * 2**10
_ENCRYPTION_OVERHEAD = 1024
"""The maximum number of bytes that encryption adds to a frame."""


class RemoteContext:
    """The context and the keys that all connections to other hosts share.

    Args:
        key: The key of the job.
        host: The address to listen on, as it is written before a port.
    """

    def __init__(self, key: bytes, host: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._server = curve.make_key_pair(derive(key, "rpc server"))
        self._client = curve.KeyPair(*zmq.curve_keypair())
        self.router = RemoteRouter(self, f"tcp://{host}:*")

    def socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """Return a socket that connects only with peers that know the key."""
        socket = self.context.socket(kind)
        is_server = kind == zmq.ROUTER
        # The limit applies to the encrypted frame. The pending calls bound the messages in transit.
        curve.configure(
            socket,
            address,
            self._server if is_server else self._client,
            b"" if is_server else self._server.public,
            max_size=MAX_FRAME_SIZE + _ENCRYPTION_OVERHEAD,
            heartbeat=_HEARTBEAT_MILLISECONDS,
            timeout=_HEARTBEAT_TIMEOUT_MILLISECONDS,
        )
        return socket

    def close(self) -> None:
        """Close the router and end the context; sent messages have two seconds to go out."""
        self.router.close()
        # Ending the context waits for unsent messages and for threads that wait for an answer.
        ending = threading.Thread(target=self.context.term, name="phalanx-rpc-end", daemon=True)
        ending.start()
        ending.join(2 * _LINGER / 1000)


class _MonitoredSocket:
    """A socket with a lock, and with a monitor of certain events."""

    def __init__(self, context: RemoteContext, kind: int, address: str, events: int) -> None:
        self._socket = context.socket(kind, address)
        self._monitor = self._socket.get_monitor_socket(events)
        self._lock = threading.Lock()
        self.monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self.fd = int(self._socket.getsockopt(zmq.FD))
        self.descriptors = self.monitor_fd, self.fd
        """The descriptors to watch."""
        # ZeroMQ signals a descriptor only after a read has found nothing.
        self.has_event()

    def has_event(self) -> bool:
        """Return whether a monitored event has occurred since the last call."""
        occurred = False
        while not self._monitor.closed:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            occurred = True
        return occurred

    def close(self) -> None:
        """Close the socket; sent messages have two seconds to go out."""
        with self._lock:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(_LINGER)


class RemoteRouter(_MonitoredSocket):
    """A socket that receives requests and sends answers; it monitors failed handshakes."""

    max_messages = 256
    """The maximum number of messages to receive before other work gets its turn."""

    def __init__(self, context: RemoteContext, address: str) -> None:
        super().__init__(context, zmq.ROUTER, address, curve.HANDSHAKE_FAILURES)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> list[tuple[bytes, Frames]]:
        """Return available messages, each with the sender to answer; there may be more."""
        messages: list[tuple[bytes, Frames]] = []
        with self._lock:
            while not self._socket.closed and len(messages) < self.max_messages:
                try:
                    identity = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if self._socket.getsockopt(zmq.RCVMORE) and (frames := _receive(self._socket)):
                    messages.append((identity, frames))
        return messages

    def send(self, identity: bytes, frame: bytes, out_of_band: Sequence[memoryview]) -> bool:
        """Send an answer; return whether a message is available that the poll may have missed."""
        with self._lock:
            if self._socket.closed:
                return False
            self._socket.send(identity, zmq.SNDMORE)
            _send(self._socket, frame, out_of_band)
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class RemoteDealer(_MonitoredSocket):
    """A connection to one peer for concurrent calls from any thread, sent in order.

    It monitors the loss of the peer.
    """

    def __init__(self, context: RemoteContext, address: str) -> None:
        super().__init__(context, zmq.DEALER, address, zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def send(self, frame: bytes, out_of_band: Sequence[memoryview]) -> list[Frames]:
        """Send a request; return answers that the poll may have missed."""
        with self._lock:
            if self._socket.closed:
                return []
            _send(self._socket, frame, out_of_band)
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return self._receive_all()
            return []

    def receive(self) -> list[Frames]:
        """Return all available answers."""
        with self._lock:
            return [] if self._socket.closed else self._receive_all()

    def _receive_all(self) -> list[Frames]:
        answers: list[Frames] = []
        while (answer := _receive(self._socket)) is not None:
            answers.append(answer)
        return answers


class RemoteConnection:
    """A connection to one peer for one call at a time; the calling thread sends and receives.

    Args:
        context: The shared context and keys.
        address: The address of the peer.
        loss_fd: A descriptor that is readable once the peer is known to be lost.
    """

    def __init__(self, context: RemoteContext, address: str, loss_fd: int) -> None:
        self._socket = context.socket(zmq.DEALER, address)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(loss_fd, zmq.POLLIN)

    def send(
        self,
        frame: bytes,
        out_of_band: Sequence[memoryview],
        end: float = math.inf,  # noqa: ARG002 - it never waits
    ) -> None:
        """Send a request. The data in `out_of_band` must not change until the answer arrives."""
        _send(self._socket, frame, out_of_band, copy=False)

    def receive(self, end: float) -> Frames | None:
        """Wait for the next answer; return None if the peer is lost or this worker leaves.

        Args:
            end: The deadline, in monotonic seconds; infinity for none.

        Raises:
            TimeoutError: There was no answer before `end`.
        """
        try:
            while True:
                seconds = max(0.0, end - time.monotonic())
                milliseconds = None if seconds == math.inf else math.ceil(seconds * 1000)
                ready = self._poller.poll(milliseconds)
                if not ready:
                    raise TimeoutError
                # The last messages of a lost peer may still be on their way.
                if not any(each is self._socket for each, _ in ready) and not self._socket.poll(
                    _DRAIN_MILLISECONDS
                ):
                    return None
                if (answer := _receive(self._socket)) is not None:
                    return answer
        except zmq.ContextTerminated:
            return None

    def close(self) -> None:
        """Close the connection at once."""
        self._socket.close(0)


def _receive(socket: zmq.Socket[bytes]) -> Frames | None:
    """Return the next message, or None if none is available."""
    try:
        frame = socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    out_of_band = []
    while socket.getsockopt(zmq.RCVMORE):
        out_of_band.append(socket.recv(copy=False).buffer)
    return frame, out_of_band


def _send(
    socket: zmq.Socket[bytes], frame: bytes, out_of_band: Sequence[memoryview], copy: bool = True
) -> None:
    # The queue is unbounded, but no longer exists if another process has the peer's address now.
    # The monitor has reported that as the loss of the peer: nothing is sent, and no call waits.
    try:
        socket.send(frame, zmq.NOBLOCK | (zmq.SNDMORE if out_of_band else 0))
    except zmq.Again:
        return
    last = len(out_of_band) - 1
    for number, part in enumerate(out_of_band):
        more = zmq.SNDMORE if number < last else 0
        socket.send(part, more, copy=copy or len(part) < _MAX_COPIED)
