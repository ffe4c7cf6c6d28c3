"""Mutual authentication of two hosts of a job by its key.

The gate sends a challenge; the guest answers it and challenges the gate. The key itself is never
sent. Then the guest sends a hello with its description and the service it requests, and the gate
answers with an error or an empty text. After that the connection belongs to the requested service.
It is not encrypted: the handshake rejects connections from strangers, but does not protect against
attackers who can change packets in transit.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from typing import Any

from phalanx.key import derive

__all__ = ["Refused", "Stranger", "answer", "as_gate", "as_guest"]

_GREETING = b"phalanx gate 1\n"
_NONCE = 32
_PROOF = hashlib.sha256().digest_size
_KNOWN, _UNKNOWN = b"\1", b"\0"
_MOST = 4096
"""The maximum size of a hello, in bytes."""


class Refused(Exception):  # noqa: N818 - the caller words the message
    """The peer is not the gate of this job, or rejects this host; the message says why."""


class Stranger(Exception):  # noqa: N818
    """The peer does not have the key, or does not follow the protocol."""


async def as_gate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes
) -> dict[str, Any]:
    """Authenticate a guest and return its hello.

    Has no timeout; the caller sets one.

    Raises:
        Stranger: The guest does not have the key, or its hello is invalid.
        EOFError: The guest has closed the connection.
        OSError: The connection is broken.
    """
    own = secrets.token_bytes(_NONCE)
    writer.write(_GREETING + own)
    theirs = await reader.readexactly(_NONCE)
    proof = await reader.readexactly(_PROOF)
    if not hmac.compare_digest(proof, _proof(key, "guest", own, theirs)):
        writer.write(_UNKNOWN)
        raise Stranger("it has another key, or none")
    writer.write(_KNOWN + _proof(key, "gate", own, theirs))
    return await _message(reader)


def answer(writer: asyncio.StreamWriter, wrong: str) -> None:
    """Answer a guest's hello with an error; empty if the hello is accepted."""
    _say(writer, {"wrong": wrong})


async def as_guest(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, hello: dict[str, Any]
) -> None:
    """Authenticate this host to the gate and the gate to this host, and send a hello.

    Raises:
        Refused: The gate rejects this host, or is not the gate of this job.
        EOFError: The gate has closed the connection.
        OSError: The connection is broken.
    """
    greeting = await reader.readexactly(len(_GREETING))
    if greeting != _GREETING:
        raise Refused("what answers there isn't `phalanx run`, or one of another version")
    theirs, own = await reader.readexactly(_NONCE), secrets.token_bytes(_NONCE)
    writer.write(own + _proof(key, "guest", theirs, own))
    if await reader.readexactly(1) != _KNOWN:
        raise Refused("it has another key than this host, or only one of the two has any")
    proof = await reader.readexactly(_PROOF)
    if not hmac.compare_digest(proof, _proof(key, "gate", theirs, own)):
        raise Refused("what answers there doesn't have the key of this job")
    _say(writer, hello)
    try:
        told = await _message(reader)
    except Stranger as wrong:
        raise Refused(f"{wrong}") from None
    if told.get("wrong"):
        raise Refused(str(told["wrong"]))


def _proof(key: bytes, who: str, gate: bytes, guest: bytes) -> bytes:
    return hmac.digest(derive(key, "gate"), who.encode() + gate + guest, hashlib.sha256)


def _say(writer: asyncio.StreamWriter, what: dict[str, Any]) -> None:
    text = json.dumps(what).encode()
    writer.write(len(text).to_bytes(4, "big") + text)


async def _message(reader: asyncio.StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MOST:
        raise Stranger(f"its hello has {size} bytes")
    try:
        said = json.loads(await reader.readexactly(size))
    except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
        raise Stranger("its hello can't be read") from None
    if not isinstance(said, dict):
        raise Stranger("its hello says nothing")
    return said
