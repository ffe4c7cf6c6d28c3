"""Keys for CURVE, ZeroMQ's encryption, derived from the job's key."""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.utils import z85

from phalanx.key import derive

__all__ = ["Pair", "of_client", "of_server"]


class Pair(NamedTuple):
    """A public key with its secret key, both in Z85."""

    public: bytes
    secret: bytes


def of_server(key: bytes) -> Pair:
    """Return the key pair of the relay; only processes of the job can derive it."""
    return _pair(key, "relay server")


def of_client(key: bytes) -> Pair:
    """Return the key pair that all clients of the relay share."""
    return _pair(key, "relay client")


def _pair(key: bytes, purpose: str) -> Pair:
    secret = z85.encode(derive(key, purpose))
    return Pair(zmq.curve_public(secret), secret)
