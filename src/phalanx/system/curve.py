"""ZeroMQ sockets that CURVE encrypts and authenticates, by key pairs derived from the job's key.

The server's public key is never sent. A peer that does not know it gets no further than the first
message of the handshake.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.utils import z85

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""The events of a socket's monitor for a rejected connection."""
_HANDSHAKE_MILLISECONDS = 10_000


class KeyPair(NamedTuple):
    """A public key with its secret key, both in Z85."""

    public: bytes
    secret: bytes


def make_key_pair(secret: bytes) -> KeyPair:
    """Return the key pair with a secret key of 32 bytes, as `phalanx.key.derive` returns them."""
    encoded = z85.encode(secret)
    return KeyPair(zmq.curve_public(encoded), encoded)


def configure(
    socket: zmq.Socket[bytes],
    endpoint: str,
    own: KeyPair,
    server: bytes = b"",
    *,
    max_size: int,
    heartbeat: int,
    timeout: int,
) -> None:
    """Encrypt a socket's connections, and limit messages and the time that a peer may be silent.

    Args:
        socket: The socket.
        endpoint: The ZeroMQ endpoint that it connects to or binds.
        own: The key pair of this side.
        server: The server's public key; empty if this side is the server.
        max_size: The maximum size of a message in bytes, encrypted.
        heartbeat: The milliseconds between heartbeats.
        timeout: The milliseconds without any after which a connection is closed.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
    socket.setsockopt(zmq.MAXMSGSIZE, max_size)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout)
    # Sender and receiver limit the data in flight themselves, so nothing queued is ever dropped.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    if server:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
