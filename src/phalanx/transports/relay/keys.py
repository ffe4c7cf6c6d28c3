"""Keys for CURVE, ZeroMQ's encryption, derived from the job's key."""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.utils import z85

from phalanx.key import derive

__all__ = ["KeyPair", "client_key_pair", "server_key_pair"]


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
