"""What strangers send, who don't have the job's key: to a socket of the host, and to a port."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.rpc.codec.message import Kind, encode_frame
from phalanx.rpc.transport import auth, local

__all__ = ["Strangers"]

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_SIZE_OF_GREETING = 64


class _Bomb:
    """What it is unpickled to is a file: the proof that a byte of a stranger was executed."""

    def __init__(self, canary: str) -> None:
        self._canary = canary

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return Path.touch, (Path(self._canary),)


class Strangers:
    """Sends to one worker.

    Args:
        near_address: Where it listens on this host.
        far_address: The URL where it listens for other hosts; empty if it doesn't.
        canary: A file that is made if anything is executed.
        seed: Of what is sent.
    """

    def __init__(self, near_address: str, far_address: str, canary: str, seed: int) -> None:
        self._near, self._far = near_address, far_address
        self._random = random.Random(seed)
        bomb = pickle.dumps((_Bomb(canary), (), {}, True))
        self._message = encode_frame(Kind.CALL, 0, 0, 1, 0, payload=bomb)
        self._silent: list[socket.socket] = []

    def send(self) -> None:
        """Send one thing, of one kind or another."""
        ways = [self._noise, self._half_a_handshake, self._wrong_key, self._says_nothing]
        if self._far:
            ways += [self._far_noise, self._far_handshake]
        self._random.choice(ways)()

    def close(self) -> None:
        """Give up."""
        for stranger in self._silent:
            stranger.close()
        self._silent.clear()

    def _connected(self) -> socket.socket:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.settimeout(30)
        stranger.connect("\0" + self._near)
        return stranger

    def _noise(self) -> None:
        begin = self._random.choice((b"", auth._MAGIC[:5], local._LENGTH.pack(10**12)))
        with self._connected() as stranger:
            _try_to_send(stranger, begin + self._random.randbytes(self._random.randrange(2000)))

    def _half_a_handshake(self) -> None:
        with self._connected() as stranger:
            _try_to_send(stranger, auth._MAGIC + self._random.randbytes(32))
            ends = (b"", self._random.randbytes(32), self._random.randbytes(32) + self._message)
            end = self._random.choice(ends)
            _try_to_send(stranger, end[: self._random.randrange(len(end) + 1)])

    def _wrong_key(self) -> None:
        try:
            auth.connect(os.urandom(32), self._near).close()
        except (OSError, PhalanxError):
            return
        raise AssertionError("a wrong key was let in")

    def _says_nothing(self) -> None:
        """It stays, and says a byte at most; of many the oldest goes."""
        stranger = self._connected()
        _try_to_send(stranger, auth._MAGIC[: self._random.randrange(2)])
        self._silent.append(stranger)
        if len(self._silent) > 200:
            self._silent.pop(0).close()

    def _far_connected(self) -> socket.socket:
        host, _, port = self._far.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=30)

    def _far_noise(self) -> None:
        with self._far_connected() as stranger:
            begin = self._random.choice((b"", _GREETING[:10], _greeting(b"CURVE")))
            _try_to_send(stranger, begin + self._random.randbytes(self._random.randrange(2000)))

    def _far_handshake(self) -> None:
        """As ZeroMQ's own, of a mechanism that isn't asked for, or without the server's key."""
        mechanism = self._random.choice((b"NULL", b"PLAIN", b"CURVE"))
        hello = b"\x05HELLO\x01\x00" + bytes(72) + self._random.randbytes(32 + 8 + 80)
        command = b"\x04" + bytes([len(hello)]) + hello
        large = b"\x06" + struct.pack(">Q", self._random.choice((10**12, 2**63, 2**64 - 1)))
        message = b"\x02" + struct.pack(">Q", len(self._message)) + self._message
        with self._far_connected() as stranger:
            _try_to_send(stranger, _greeting(mechanism))
            for part in self._random.sample((command, large, message), 3):
                _try_to_send(stranger, part)


def _greeting(mechanism: bytes) -> bytes:
    return (_GREETING + mechanism.ljust(20, b"\0")).ljust(_SIZE_OF_GREETING, b"\0")


def _try_to_send(stranger: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it was turned away already
        stranger.sendall(data)
