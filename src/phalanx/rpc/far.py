"""Connections to workers of other hosts: ZeroMQ's sockets, encrypted, bounded, with locks.

CURVE keeps strangers out. The server's public key follows from the job's key and is never sent: who
doesn't know it gets no further than the first message of the handshake, and nothing that it sends
reaches this package.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from phalanx.key import derived
from phalanx.rpc.wire import FRAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.rpc.freight import Frames

__all__ = ["Far", "Inbox", "Line", "Outbox"]

_LINGER = 2_000
"""Milliseconds that closing waits for what was sent."""
_BEAT_MILLISECONDS = 1_000
_LOST_MILLISECONDS = 5_000
_HANDSHAKE_MILLISECONDS = 10_000
_LAST_WORDS_MILLISECONDS = 100
_COPIED = 64 * 2**10
_ENVELOPE = 1024
"""Bytes that encryption adds to a frame, at most."""
_NO_ENTRY = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Far:
    """What all connections to other hosts share.

    Args:
        key: The job's.
        host: The address to listen on, as it stands in front of a port.
    """

    def __init__(self, key: bytes, host: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._secret = z85.encode(derived(key, "rpc server"))
        self._public = zmq.curve_public(self._secret)
        self._own_public, self._own_secret = zmq.curve_keypair()
        self.inbox = Inbox(self, f"tcp://{host}:*")

    def socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """A socket that lets in, and is let in by, who knows the key alone."""
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, address.startswith("tcp://["))
        # What is counted is the encrypted frame.
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME + _ENVELOPE)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MILLISECONDS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _LOST_MILLISECONDS)
        # What is under way is bounded by the calls that wait for it: nothing of it may be dropped.
        # Nor may receiving pause: the heartbeats of who is busy would be late.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if kind == zmq.ROUTER:
            socket.curve_server = True
            socket.curve_secretkey, socket.curve_publickey = self._secret, self._public
        else:
            socket.curve_serverkey = self._public
            socket.curve_secretkey, socket.curve_publickey = self._own_secret, self._own_public
        return socket

    def close(self) -> None:
        """Close what isn't closed yet; what was sent goes out if it can within two seconds."""
        self.inbox.close()
        # It waits for what is still to go out, and for threads that wait for an answer just now.
        ending = threading.Thread(target=self.context.term, name="phalanx-rpc-end", daemon=True)
        ending.start()
        ending.join(2 * _LINGER / 1000)


class _Watched:
    """A socket with a lock, whose mishaps are noticed."""

    def __init__(self, far: Far, kind: int, address: str, mishaps: int) -> None:
        self._socket = far.socket(kind, address)
        self._monitor = self._socket.get_monitor_socket(mishaps)
        self._lock = threading.Lock()
        self.monitor_descriptor = int(self._monitor.getsockopt(zmq.FD))
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        # ZeroMQ signals only to one who has looked in vain.
        self.mishap()

    def mishap(self) -> bool:
        """Whether something that is watched for has happened since this was last asked."""
        happened = False
        while not self._monitor.closed:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            happened = True
        return happened

    def close(self) -> None:
        """Close, once what was sent is out, or after two seconds."""
        with self._lock:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(_LINGER)


class Inbox(_Watched):
    """Where requests come in, and their answers go out; a mishap is a stranger turned away."""

    at_a_time = 256
    """Messages to receive before others have their turn."""

    def __init__(self, far: Far, address: str) -> None:
        super().__init__(far, zmq.ROUTER, address, _NO_ENTRY)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> list[tuple[bytes, Frames]]:
        """Messages that are there, each with whom its answer goes to; there may be more."""
        messages: list[tuple[bytes, Frames]] = []
        with self._lock:
            while not self._socket.closed and len(messages) < self.at_a_time:
                try:
                    who = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if self._socket.getsockopt(zmq.RCVMORE):
                    messages.append((who, (self._socket.recv(), _behind(self._socket))))
        return messages

    def send(self, who: bytes, frame: bytes, behind: Sequence[memoryview]) -> bool:
        """Send an answer; returns whether a message waits whose coming the poll may have missed."""
        with self._lock:
            if self._socket.closed:
                return False
            self._socket.send(who, zmq.SNDMORE)
            _send(self._socket, frame, behind)
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Outbox(_Watched):
    """To one peer: many calls at a time, from any thread; in order. A mishap is its loss."""

    def __init__(self, far: Far, address: str) -> None:
        super().__init__(far, zmq.DEALER, address, zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def send(self, frame: bytes, behind: Sequence[memoryview]) -> list[Frames]:
        """Send a request; returns answers whose coming the poll may have missed."""
        with self._lock:
            if self._socket.closed:
                return []
            _send(self._socket, frame, behind)
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return self._drained()
            return []

    def receive(self) -> list[Frames]:
        """All answers that are there."""
        with self._lock:
            return [] if self._socket.closed else self._drained()

    def _drained(self) -> list[Frames]:
        answers: list[Frames] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return answers
            answers.append((frame, _behind(self._socket)))


class Line:
    """To one peer: one call at a time, whose thread sends and receives itself.

    Args:
        far: The context and the key.
        address: The peer's.
        lost: What can be read once the peer is known to be lost.
    """

    def __init__(self, far: Far, address: str, lost: int) -> None:
        self._socket = far.socket(zmq.DEALER, address)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(lost, zmq.POLLIN)

    def send(
        self,
        frame: bytes,
        behind: Sequence[memoryview],
        end: float = math.inf,  # noqa: ARG002 - it never waits
    ) -> None:
        """Send a request. The data behind it must not change until its answer is there."""
        _send(self._socket, frame, behind, copy=False)

    def receive(self, end: float) -> Frames | None:
        """The next answer; None if the peer is lost, or this worker leaves.

        Args:
            end: When to give up, in monotonic seconds; infinity for never.

        Raises:
            TimeoutError: It didn't come before `end`.
        """
        try:
            return self._received(end)
        except zmq.ContextTerminated:
            return None

    def close(self) -> None:
        """Close at once."""
        self._socket.close(0)

    def _received(self, end: float) -> Frames | None:
        while True:
            seconds = max(0.0, end - time.monotonic())
            left = None if seconds == math.inf else math.ceil(seconds * 1000)
            ready = self._poller.poll(left)
            if not ready:
                raise TimeoutError
            # A peer's last words may still be on their way when it is known to be lost.
            if not any(each is self._socket for each, _ in ready) and not self._socket.poll(
                _LAST_WORDS_MILLISECONDS
            ):
                return None
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                continue
            return frame, _behind(self._socket)


def _behind(socket: zmq.Socket[bytes]) -> list[memoryview]:
    frames = []
    while socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv(copy=False).buffer)
    return frames


def _send(
    socket: zmq.Socket[bytes], frame: bytes, behind: Sequence[memoryview], copy: bool = True
) -> None:
    # A queue takes all there is; it is gone where a stranger has the peer's address now. That has
    # been a mishap, which says who is lost: nothing is sent, and nobody waits.
    try:
        socket.send(frame, zmq.NOBLOCK | (zmq.SNDMORE if behind else 0))
    except zmq.Again:
        return
    last = len(behind) - 1
    for number, part in enumerate(behind):
        more = zmq.SNDMORE if number < last else 0
        socket.send(part, more, copy=copy or len(part) < _COPIED)
