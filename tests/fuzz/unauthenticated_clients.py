"""Clients without the job's key, which send data to a worker's socket and port."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.rpc import local_connection as local
from phalanx.rpc.message import Kind, encode_frame

__all__ = ["UnauthenticatedClients"]

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_GREETING_SIZE = 64


class _Bomb:
    """An object that creates a file when unpickled, which proves that the data was executed."""

    def __init__(self, canary: str) -> None:
        self._canary = canary

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return Path.touch, (Path(self._canary),)


class UnauthenticatedClients:
    """Senders of random data to one worker.

    Args:
        local_address: The address on which the worker listens for this host.
        remote_address: The URL on which it listens for other hosts; empty if it does not.
        canary: A file that is created if the data is executed.
        seed: The seed of the random data.
    """

    def __init__(self, local_address: str, remote_address: str, canary: str, seed: int) -> None:
        self._local_address, self._remote_address = local_address, remote_address
        self._random = random.Random(seed)
        bomb = pickle.dumps((_Bomb(canary), (), {}, True))
        self._message = encode_frame(Kind.CALL, 0, 1, payload=bomb)
        self._silent: list[socket.socket] = []

    def send(self) -> None:
        """Send random data in one of several ways."""
        methods = [self._noise, self._partial_handshake, self._wrong_key, self._stay_silent]
        if self._remote_address:
            methods += [self._remote_noise, self._remote_handshake]
        self._random.choice(methods)()

    def close(self) -> None:
        """Close all connections."""
        for client in self._silent:
            client.close()
        self._silent.clear()

    def _connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(30)
        client.connect("\0" + self._local_address)
        return client

    def _noise(self) -> None:
        prefix = self._random.choice((b"", local._PROTOCOL[:5], local._LENGTH.pack(10**12)))
        with self._connect() as client:
            _try_to_send(client, prefix + self._random.randbytes(self._random.randrange(2000)))

    def _partial_handshake(self) -> None:
        with self._connect() as client:
            _try_to_send(client, local._PROTOCOL + self._random.randbytes(32))
            ends = (b"", self._random.randbytes(32), self._random.randbytes(32) + self._message)
            end = self._random.choice(ends)
            _try_to_send(client, end[: self._random.randrange(len(end) + 1)])

    def _wrong_key(self) -> None:
        try:
            local.connect(os.urandom(32), self._local_address).close()
        except (OSError, PhalanxError):
            return
        raise AssertionError("a wrong key was accepted")

    def _stay_silent(self) -> None:
        """Keep a connection open that sends at most a byte; close the oldest of many."""
        client = self._connect()
        _try_to_send(client, local._PROTOCOL[: self._random.randrange(2)])
        self._silent.append(client)
        if len(self._silent) > 200:
            self._silent.pop(0).close()

    def _connect_remote(self) -> socket.socket:
        host, _, port = self._remote_address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=30)

    def _remote_noise(self) -> None:
        with self._connect_remote() as client:
            prefix = self._random.choice((b"", _GREETING[:10], _greeting(b"CURVE")))
            _try_to_send(client, prefix + self._random.randbytes(self._random.randrange(2000)))

    def _remote_handshake(self) -> None:
        """Send a ZeroMQ handshake of another mechanism, or without the server's key."""
        mechanism = self._random.choice((b"NULL", b"PLAIN", b"CURVE"))
        hello = b"\x05HELLO\x01\x00" + bytes(72) + self._random.randbytes(32 + 8 + 80)
        command = b"\x04" + bytes([len(hello)]) + hello
        large = b"\x06" + struct.pack(">Q", self._random.choice((10**12, 2**63, 2**64 - 1)))
        message = b"\x02" + struct.pack(">Q", len(self._message)) + self._message
        with self._connect_remote() as client:
            _try_to_send(client, _greeting(mechanism))
            for part in self._random.sample((command, large, message), 3):
                _try_to_send(client, part)


def _greeting(mechanism: bytes) -> bytes:
    return (_GREETING + mechanism.ljust(20, b"\0")).ljust(_GREETING_SIZE, b"\0")


def _try_to_send(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the connection may already be rejected
        client.sendall(data)
