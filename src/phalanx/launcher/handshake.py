"""Mutual authentication of two hosts of a job by its key.

The tunnel server sends a challenge; the client answers it and challenges the server. The key itself
is never sent. Then the client sends a hello with its description and the service it requests, and
the server replies with an error or an empty text. After that the connection belongs to the
requested service. It is not encrypted: the handshake rejects connections without the key, but does
not protect against attackers who can change packets in transit.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from typing import Any

from phalanx.key import derive

__all__ = [
    "HandshakeError",
    "RejectedError",
    "authenticate_client",
    "authenticate_to_server",
    "send_reply",
]

_GREETING = b"phalanx tunnel 1\n"
_NONCE_SIZE = 32
_PROOF_SIZE = hashlib.sha256().digest_size
_ACCEPTED, _REJECTED = b"\1", b"\0"
_MAX_HELLO_BYTES = 4096
"""The maximum size of a hello, in bytes."""


class RejectedError(Exception):
    """The peer is not the tunnel server of this job, or rejects this host; the message says why."""


class HandshakeError(Exception):
    """The peer does not have the key, or does not follow the protocol."""


async def authenticate_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes
) -> dict[str, Any]:
    """Authenticate a client and return its hello.

    Has no timeout; the caller sets one.

    Raises:
        HandshakeError: The client does not have the key, or its hello is invalid.
        EOFError: The client has closed the connection.
        OSError: The connection is broken.
    """
    own_nonce = secrets.token_bytes(_NONCE_SIZE)
    writer.write(_GREETING + own_nonce)
    peer_nonce = await reader.readexactly(_NONCE_SIZE)
    proof = await reader.readexactly(_PROOF_SIZE)
    if not hmac.compare_digest(proof, _proof(key, "client", own_nonce, peer_nonce)):
        writer.write(_REJECTED)
        raise HandshakeError("it has a different key or none")
    writer.write(_ACCEPTED + _proof(key, "server", own_nonce, peer_nonce))
    return await _receive(reader)


def send_reply(writer: asyncio.StreamWriter, error: str) -> None:
    """Reply to a client's hello with an error; empty if the hello is accepted."""
    _send(writer, {"error": error})


async def authenticate_to_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, hello: dict[str, Any]
) -> None:
    """Authenticate this host and the tunnel server to each other, and send a hello.

    Raises:
        RejectedError: The server rejects this host, or is not the one of this job.
        EOFError: The server has closed the connection.
        OSError: The connection is broken.
    """
    greeting = await reader.readexactly(len(_GREETING))
    if greeting != _GREETING:
        raise RejectedError("the program there is not `phalanx run`, or is a different version")
    peer_nonce, own_nonce = await reader.readexactly(_NONCE_SIZE), secrets.token_bytes(_NONCE_SIZE)
    writer.write(own_nonce + _proof(key, "client", peer_nonce, own_nonce))
    if await reader.readexactly(1) != _ACCEPTED:
        raise RejectedError("the two hosts have different keys, or only one of them has a key")
    proof = await reader.readexactly(_PROOF_SIZE)
    if not hmac.compare_digest(proof, _proof(key, "server", peer_nonce, own_nonce)):
        raise RejectedError("the server there does not have this job's key")
    _send(writer, hello)
    try:
        reply = await _receive(reader)
    except HandshakeError as error:
        raise RejectedError(f"{error}") from None
    if reply.get("error"):
        raise RejectedError(str(reply["error"]))


def _proof(key: bytes, role: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(
        derive(key, "tunnel"), role.encode() + server_nonce + client_nonce, hashlib.sha256
    )


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    writer.write(len(text).to_bytes(4, "big") + text)


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MAX_HELLO_BYTES:
        raise HandshakeError(f"its hello has {size} bytes")
    try:
        message = json.loads(await reader.readexactly(size))
    except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
        raise HandshakeError("its hello can't be parsed") from None
    if not isinstance(message, dict):
        raise HandshakeError("its hello is not a JSON object")
    return message
