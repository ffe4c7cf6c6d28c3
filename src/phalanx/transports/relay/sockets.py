"""ZeroMQ sockets of the relay and its clients: their limits and keys."""

from __future__ import annotations

import zmq

from phalanx.key import derive
from phalanx.system import curve

__all__ = [
    "MAX_DATA_BYTES",
    "client_key_pair",
    "configure_client",
    "configure_server",
    "server_key_pair",
]

MAX_DATA_BYTES = 256 * 2**10
"""The maximum size of the data of a frame in bytes."""
_HEARTBEAT_MILLISECONDS = 2_000
_TIMEOUT_MILLISECONDS = 10_000


def configure_server(socket: zmq.Socket[bytes], endpoint: str, key: bytes) -> None:
    """Prepare the socket of the relay, which binds `endpoint`."""
    _configure(socket, endpoint, server_key_pair(key))


def configure_client(socket: zmq.Socket[bytes], endpoint: str, key: bytes) -> None:
    """Prepare the socket of a client of the relay, which connects to `endpoint`."""
    _configure(socket, endpoint, client_key_pair(key), server_key_pair(key).public)


def _configure(
    socket: zmq.Socket[bytes], endpoint: str, own: curve.KeyPair, server: bytes = b""
) -> None:
    curve.configure(
        socket,
        endpoint,
        own,
        server,
        max_size=2 * MAX_DATA_BYTES,
        heartbeat=_HEARTBEAT_MILLISECONDS,
        timeout=_TIMEOUT_MILLISECONDS,
    )


def server_key_pair(key: bytes) -> curve.KeyPair:
    """Return the key pair of the relay; only processes of the job can derive it."""
    return curve.make_key_pair(derive(key, "relay server"))


def client_key_pair(key: bytes) -> curve.KeyPair:
    """Return the key pair that all clients of the relay share."""
    return curve.make_key_pair(derive(key, "relay client"))
