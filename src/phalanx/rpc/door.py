"""How two workers of a host come to a connection: each proves that it knows the job's key.

By nonces of both and a keyed digest of them (HMAC), so that nothing that was recorded is worth
anything later; and who connects must be the same user. Before that nothing of a message is read.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import os
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING

from phalanx.errors import CallTimeout, PhalanxError
from phalanx.key import derived
from phalanx.rpc.near import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PATIENCE", "Door", "connect"]

_MAGIC = b"PhRPC/1\n"
_NONCE = 32
_PROOF = 32
_CREDENTIALS = struct.Struct("3i")
_MOST_STRANGERS = 64
PATIENCE = 10.0
"""Seconds for a proof; more are given only where the other one may not have begun."""
_LEAST_PATIENCE = 1e-3
_PAUSE = 0.01
"""Seconds to wait where this process, or the other one, has no room just now."""
_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_LOG = logging.getLogger("phalanx.rpc")


class Door:
    """Where workers of this host connect, and strangers are turned away.

    Args:
        key: The job's.
        address: The name to listen at, in the kernel's own name space: nothing is left on a disk.
        refused: Called when a stranger was turned away.
    """

    def __init__(self, key: bytes, address: str, refused: Callable[[], None]) -> None:
        self._key, self._refused = _own_key(key, address), refused
        self._has_no_room = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + address)
        self._socket.listen(1024)
        self.descriptor = self._socket.fileno()
        self._strangers: dict[int, _Stranger] = {}

    def knock(self) -> list[int]:
        """Take in all who connect; returns what to poll, and to call `admit` with then."""
        new: list[int] = []
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._wait_for_room(error)
                return new
            if _user(connection) != os.geteuid():
                connection.close()
                self._refused()
                continue
            stranger = _Stranger(connection, self._key)
            self._strangers[connection.fileno()] = stranger
            new.append(connection.fileno())

    def crowd(self) -> list[int]:
        """Whom to turn away because there are too many of them, or they take too long."""
        late = time.monotonic() - PATIENCE
        too_many = len(self._strangers) - _MOST_STRANGERS
        return [
            descriptor
            for number, (descriptor, stranger) in enumerate(self._strangers.items())
            if number < too_many or stranger.since < late
        ]

    def turn_away(self, descriptor: int) -> None:
        """Close the connection of one who hasn't proved anything."""
        self._strangers.pop(descriptor).connection.close()
        self._refused()

    def admit(self, descriptor: int) -> Stream | bool:
        """One has said something: the connection once it has proved that it knows the key.

        Returns:
            The stream; True while there is more to be said; False if it is to be turned away.
        """
        stranger = self._strangers[descriptor]
        try:
            is_known = stranger.hear()
        except OSError:
            return False
        if is_known:
            del self._strangers[descriptor]
            stranger.connection.setblocking(True)
            return Stream(stranger.connection)
        return is_known is None

    def _wait_for_room(self, error: OSError) -> None:
        """Who connects waits in the kernel meanwhile; polling would only say so again, at once."""
        if not self._has_no_room:
            self._has_no_room = True
            _LOG.warning("%s: workers that connect have to wait; raise `ulimit -n`", error.strerror)
        time.sleep(_PAUSE)

    def close(self) -> None:
        """Close it, and the connections of all who haven't proved anything."""
        for stranger in self._strangers.values():
            stranger.connection.close()
        self._strangers.clear()
        self._socket.close()


class _Stranger:
    """One who has connected, and hasn't proved anything yet."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        connection.setblocking(False)
        self.connection, self.since = connection, time.monotonic()
        self._key, self._said = key, b""
        self._nonce = secrets.token_bytes(_NONCE)

    def hear(self) -> bool | None:
        """Whether it has proved that it knows the key; None: not yet."""
        hello = len(_MAGIC) + _NONCE
        was = len(self._said)
        data = self.connection.recv((hello if was < hello else hello + _PROOF) - was)
        if not data:
            return False
        self._said += data
        if self._said[: len(_MAGIC)] != _MAGIC[: len(self._said)]:
            return False
        theirs = self._said[len(_MAGIC) : hello]
        if was < hello == len(self._said):
            self.connection.send(self._nonce + _proof(self._key, b"listens", theirs, self._nonce))
        if len(self._said) < hello + _PROOF:
            return None
        proof = _proof(self._key, b"connects", self._nonce, theirs)
        return hmac.compare_digest(proof, self._said[hello:])


def connect(key: bytes, address: str, end: float = math.inf, most: float = PATIENCE) -> Stream:
    """Connect to a worker of this host; blocks until each has proved that it knows the key.

    Args:
        key: The job's.
        address: Where the worker listens.
        end: When to give up, in monotonic seconds.
        most: Seconds that it is given anyhow.

    Raises:
        OSError: Nobody listens there.
        CallTimeout: The worker didn't answer before `end`.
        PhalanxError: Who listens there doesn't know the key or doesn't answer, or this process has
            no room for a connection.
    """
    now = time.monotonic()
    patience = min(max(_LEAST_PATIENCE, end - now), most)
    own = _own_key(key, address)
    try:
        while True:
            try:
                return _connected(own, address, patience)
            except (ConnectionResetError, BrokenPipeError):
                # It makes room by turning away who hasn't proved anything yet.
                if time.monotonic() > now + patience:
                    raise
                time.sleep(_PAUSE)
    except TimeoutError:
        kind = CallTimeout if patience < most else PhalanxError
        words = f"who listens there didn't answer within {patience:.2g} s: is it stopped?"
        raise kind(words) from None
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise PhalanxError(
                f"no connection can be made: {error.strerror}; raise `ulimit -n`, or close files"
            ) from None
        raise


def _connected(own: bytes, address: str, patience: float) -> Stream:
    nonce = secrets.token_bytes(_NONCE)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(None if patience == math.inf else patience)
        connection.connect("\0" + address)
        if _user(connection) != os.geteuid():
            raise PhalanxError("who listens there is another user")
        connection.sendall(_MAGIC + nonce)
        said = b""
        while len(said) < _NONCE + _PROOF:
            part = connection.recv(_NONCE + _PROOF - len(said))
            if not part:
                raise ConnectionResetError("the connection was closed")
            said += part
        theirs, proof = said[:_NONCE], said[_NONCE:]
        if not hmac.compare_digest(proof, _proof(own, b"listens", nonce, theirs)):
            raise PhalanxError("who listens there doesn't know the job's key")
        connection.sendall(_proof(own, b"connects", theirs, nonce))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return Stream(connection)


def _own_key(key: bytes, address: str) -> bytes:
    """What proofs are made with at one address: they are worth nothing at another one."""
    return derived(key, f"rpc on a host: {address}")


def _user(connection: socket.socket) -> int:
    """Whose the process at the other end is."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user


def _proof(key: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key, who + first + second, "sha256")
