"""Authentication of connections between workers on one host.

Each side proves that it knows the job's key, by a keyed digest (HMAC) of nonces of both sides:
recorded traffic is thus useless later. Both processes must also belong to the same user. No part of
a message is read before that.
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
from phalanx.key import derive
from phalanx.rpc.transport.local import LocalConnection

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HANDSHAKE_TIMEOUT", "Acceptor", "connect"]

_MAGIC = b"PhRPC/1\n"
_NONCE = 32
_PROOF = 32
_CREDENTIALS = struct.Struct("3i")
_MAX_HANDSHAKES = 64
HANDSHAKE_TIMEOUT = 10.0
"""Seconds to wait for a proof; longer only if the peer may not have started yet."""
_MIN_HANDSHAKE_TIMEOUT = 1e-3
_RETRY_SECONDS = 0.01
"""Seconds to wait if this process, or the peer, is out of descriptors or memory."""
_OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_LOG = logging.getLogger("phalanx.rpc")


class Acceptor:
    """A listening socket for workers on this host that rejects unauthenticated connections.

    Args:
        key: The key of the job.
        address: The name to listen at, in the kernel's abstract namespace, which leaves no file.
        on_rejected: Called after a connection is rejected.
    """

    def __init__(self, key: bytes, address: str, on_rejected: Callable[[], None]) -> None:
        self._key, self._on_rejected = _derive_key(key, address), on_rejected
        self._is_out_of_resources = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + address)
        self._socket.listen(1024)
        self.fd = self._socket.fileno()
        self._handshakes: dict[int, _Handshake] = {}

    def accept(self) -> list[int]:
        """Accept all waiting connections.

        Returns:
            Descriptors to poll; `authenticate` must be called when one is readable.
        """
        new: list[int] = []
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._wait_for_resources(error)
                return new
            if _peer_user(connection) != os.geteuid():
                connection.close()
                self._on_rejected()
                continue
            handshake = _Handshake(connection, self._key)
            self._handshakes[connection.fileno()] = handshake
            new.append(connection.fileno())

    def find_excess(self) -> list[int]:
        """Return the unauthenticated connections to reject: those in excess and those too slow."""
        oldest = time.monotonic() - HANDSHAKE_TIMEOUT
        too_many = len(self._handshakes) - _MAX_HANDSHAKES
        return [
            fd
            for number, (fd, handshake) in enumerate(self._handshakes.items())
            if number < too_many or handshake.since < oldest
        ]

    def reject(self, fd: int) -> None:
        """Close an unauthenticated connection."""
        self._handshakes.pop(fd).connection.close()
        self._on_rejected()

    def authenticate(self, fd: int) -> LocalConnection | bool:
        """Continue the authentication of a connection that is readable.

        Returns:
            The connection, once the peer has proved that it knows the key; True if more data is
            needed; False if the connection must be rejected.
        """
        handshake = self._handshakes[fd]
        try:
            is_authenticated = handshake.receive()
        except OSError:
            return False
        if is_authenticated:
            del self._handshakes[fd]
            handshake.connection.setblocking(True)
            return LocalConnection(handshake.connection)
        return is_authenticated is None

    def _wait_for_resources(self, error: OSError) -> None:
        """Pause while peers wait in the kernel; polling would only report them again, at once."""
        if not self._is_out_of_resources:
            self._is_out_of_resources = True
            _LOG.warning("%s: workers that connect have to wait; raise `ulimit -n`", error.strerror)
        time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Close the socket and all unauthenticated connections."""
        for handshake in self._handshakes.values():
            handshake.connection.close()
        self._handshakes.clear()
        self._socket.close()


class _Handshake:
    """A connection that is not authenticated yet."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        connection.setblocking(False)
        self.connection, self.since = connection, time.monotonic()
        self._key, self._received = key, b""
        self._nonce = secrets.token_bytes(_NONCE)

    def receive(self) -> bool | None:
        """Read, and return whether the peer knows the key; None if that is still open."""
        opening = len(_MAGIC) + _NONCE
        before = len(self._received)
        data = self.connection.recv((opening if before < opening else opening + _PROOF) - before)
        if not data:
            return False
        self._received += data
        if self._received[: len(_MAGIC)] != _MAGIC[: len(self._received)]:
            return False
        peer_nonce = self._received[len(_MAGIC) : opening]
        if before < opening == len(self._received):
            self.connection.send(
                self._nonce + _make_proof(self._key, b"listens", peer_nonce, self._nonce)
            )
        if len(self._received) < opening + _PROOF:
            return None
        proof = _make_proof(self._key, b"connects", self._nonce, peer_nonce)
        return hmac.compare_digest(proof, self._received[opening:])


def connect(
    key: bytes, address: str, end: float = math.inf, max_wait: float = HANDSHAKE_TIMEOUT
) -> LocalConnection:
    """Connect to a worker on this host; block until both have proved that they know the key.

    Args:
        key: The key of the job.
        address: The address at which the worker listens.
        end: The deadline, in monotonic seconds.
        max_wait: The maximum number of seconds to wait for the worker, even if `end` is later.

    Raises:
        OSError: Nobody listens at the address.
        CallTimeout: The worker did not answer before `end`.
        PhalanxError: The listener does not know the key, belongs to another user or does not answer
            within `max_wait` seconds, or this process has no room for a connection.
    """
    now = time.monotonic()
    timeout = min(max(_MIN_HANDSHAKE_TIMEOUT, end - now), max_wait)
    address_key = _derive_key(key, address)
    try:
        while True:
            try:
                return _authenticate(address_key, address, timeout)
            except (ConnectionResetError, BrokenPipeError):
                # The listener makes room by closing unauthenticated connections.
                if time.monotonic() > now + timeout:
                    raise
                time.sleep(_RETRY_SECONDS)
    except TimeoutError:
        kind = CallTimeout if timeout < max_wait else PhalanxError
        words = f"the worker there did not answer within {timeout:.2g} s: is it stopped?"
        raise kind(words) from None
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise PhalanxError(
                f"no connection can be made: {error.strerror}; raise `ulimit -n`, or close files"
            ) from None
        raise


def _authenticate(address_key: bytes, address: str, timeout: float) -> LocalConnection:
    nonce = secrets.token_bytes(_NONCE)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(None if timeout == math.inf else timeout)
        connection.connect("\0" + address)
        if _peer_user(connection) != os.geteuid():
            raise PhalanxError("the process that listens there belongs to another user")
        connection.sendall(_MAGIC + nonce)
        received = b""
        while len(received) < _NONCE + _PROOF:
            part = connection.recv(_NONCE + _PROOF - len(received))
            if not part:
                raise ConnectionResetError("the connection was closed")
            received += part
        peer_nonce, proof = received[:_NONCE], received[_NONCE:]
        if not hmac.compare_digest(proof, _make_proof(address_key, b"listens", nonce, peer_nonce)):
            raise PhalanxError("the process that listens there does not know the job's key")
        connection.sendall(_make_proof(address_key, b"connects", peer_nonce, nonce))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return LocalConnection(connection)


def _derive_key(key: bytes, address: str) -> bytes:
    """Return the key for proofs at one address, which are useless at another one."""
    return derive(key, f"rpc on a host: {address}")


def _peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user


def _make_proof(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key, role + first + second, "sha256")
