"""The job's key in the form that CURVE, ZeroMQ's encryption, has keys in."""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.utils import z85

from phalanx.key import derived

__all__ = ["Pair", "of_client", "of_server"]


class Pair(NamedTuple):
    """A public key and its secret one, in Z85."""

    public: bytes
    secret: bytes


def of_server(key: bytes) -> Pair:
    """The relay's; who knows them both is a process of the job."""
    return _pair(key, "relay server")


def of_client(key: bytes) -> Pair:
    """That of all who connect to it."""
    return _pair(key, "relay client")


def _pair(key: bytes, purpose: str) -> Pair:
    secret = z85.encode(derived(key, purpose))
    return Pair(zmq.curve_public(secret), secret)
