"""ZeroMQ sockets of the relay and its clients: their options, their keys and a waker.

The keys for CURVE, ZeroMQ's encryption, are derived from the job's key.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import zmq
from zmq.utils import z85

from phalanx.key import derive

__all__ = [
    "HANDSHAKE_FAILURES",
    "MAX_DATA_BYTES",
    "KeyPair",
    "Waker",
    "client_key_pair",
    "configure",
    "server_key_pair",
]

MAX_DATA_BYTES = 256 * 2**10
"""The maximum size of the data of a frame in bytes."""
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""The events of a socket's monitor for a rejected connection."""
_HEARTBEAT_MILLISECONDS = 2_000
_TIMEOUT_MILLISECONDS = 10_000


def configure(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Limit the size of messages, and the time until a silent connection is closed.

    Args:
        socket: The socket.
        endpoint: The ZeroMQ endpoint that it connects to or binds.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_DATA_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _TIMEOUT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TIMEOUT_MILLISECONDS)
    # Sender and receiver limit the data in flight themselves, so nothing queued is ever dropped.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class KeyPair(NamedTuple):
    """A public key with its secret key, both in Z85."""

    public: bytes
    secret: bytes


def server_key_pair(key: bytes) -> KeyPair:
    """Return the key pair of the relay; only processes of the job can derive it."""
    return _pair(key, "relay server")


def client_key_pair(key: bytes) -> KeyPair:
    """Return the key pair that all clients of the relay share."""
    return _pair(key, "relay client")


def _pair(key: bytes, purpose: str) -> KeyPair:
    secret = z85.encode(derive(key, purpose))
    return KeyPair(zmq.curve_public(secret), secret)


class Waker:
    """A pollable object by which other threads wake a polling thread."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._descriptor

    def wake(self) -> None:
        """Wake the polling thread, now or at its next poll."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Clear all calls of `wake` so far."""
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; no thread may call `wake` afterwards."""
        os.close(self._descriptor)
