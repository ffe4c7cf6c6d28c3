"""Mutual authentication of two processes that share a key.

The initiator sends a nonce. The acceptor answers with a nonce of its own and a proof: a keyed
digest (HMAC-SHA256) of its role and both nonces. Then the initiator sends its proof. The key is
never sent, a recorded exchange is useless later, and the proof of one role is not valid for the
other. Nothing is encrypted: an attacker who can change packets in transit can take over the
connection afterwards, unless it is encrypted then (`launcher.tunnel_encryption`).
"""

from __future__ import annotations

import hmac
import secrets

_NONCE = 32
_PROOF = 32
_ACCEPTOR, _INITIATOR = b"acceptor", b"initiator"


class AuthenticationError(Exception):
    """The peer could not be authenticated."""


class ProtocolMismatch(AuthenticationError):  # noqa: N818 - the base class has the suffix
    """The peer uses another protocol, or another version of it."""


class WrongKey(AuthenticationError):  # noqa: N818
    """The peer has another key, or none."""


class Handshake:
    """One side of the authentication of a connection.

    It does no I/O, so it serves blocking sockets and event loops alike: send what `begin` and
    `receive` return, and pass received bytes to `receive` until `missing` is 0.

    Args:
        key: The key that both sides share, derived for one purpose (`phalanx.key.derive`).
        protocol: The name and version of the protocol, which each side sends first.
        is_initiator: Whether this side opened the connection.
    """

    def __init__(self, key: bytes, protocol: bytes, *, is_initiator: bool) -> None:
        self._key, self._protocol, self._is_initiator = key, protocol, is_initiator
        self._nonce, self._peer_nonce = secrets.token_bytes(_NONCE), b""
        self._received = b""
        self.missing = len(protocol) + _NONCE + (_PROOF if is_initiator else 0)
        """The number of bytes to receive next; 0 once the peer is authenticated."""

    def begin(self) -> bytes:
        """Return the bytes to send first; the acceptor sends nothing before it receives."""
        return self._protocol + self._nonce if self._is_initiator else b""

    def receive(self, data: bytes) -> bytes:
        """Process received bytes, at most `missing`, and return the bytes to send.

        Raises:
            ProtocolMismatch: The peer uses another protocol.
            WrongKey: The peer has another key, or none.
        """
        self._received += data
        self.missing -= len(data)
        if not self._peer_nonce:
            size = len(self._protocol)
            if self._received[:size] != self._protocol[: len(self._received)]:
                raise ProtocolMismatch("the peer uses another protocol, or another version of it")
        if self.missing:
            return b""
        return self._answer()

    def refuse(self) -> bytes:
        """Return the bytes by which an initiator lets an acceptor with another key notice that."""
        return bytes(_PROOF)

    def _answer(self) -> bytes:
        """Return the answer to a complete message, of which there is one or two."""
        message, self._received = self._received, b""
        if self._is_initiator:
            message = message[len(self._protocol) :]
            self._peer_nonce = message[:_NONCE]
            self._verify(_ACCEPTOR, self._nonce, self._peer_nonce, message[_NONCE:])
            return self._prove(_INITIATOR, self._nonce, self._peer_nonce)
        if not self._peer_nonce:
            self._peer_nonce = message[len(self._protocol) :]
            self.missing = _PROOF
            proof = self._prove(_ACCEPTOR, self._peer_nonce, self._nonce)
            return self._protocol + self._nonce + proof
        self._verify(_INITIATOR, self._peer_nonce, self._nonce, message)
        return b""

    def _prove(self, role: bytes, initiator_nonce: bytes, acceptor_nonce: bytes) -> bytes:
        return hmac.digest(self._key, role + initiator_nonce + acceptor_nonce, "sha256")

    def _verify(
        self, role: bytes, initiator_nonce: bytes, acceptor_nonce: bytes, proof: bytes
    ) -> None:
        if not hmac.compare_digest(proof, self._prove(role, initiator_nonce, acceptor_nonce)):
            raise WrongKey("the peer has another key, or none")
