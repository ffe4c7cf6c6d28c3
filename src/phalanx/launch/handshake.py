"""How two hosts of a job prove to each other that they have its key.

The gate sends a challenge, the guest answers it and challenges the gate in turn; the key itself is
never sent. Then the guest says what it is and what it wants, and is told what is wrong with that,
if anything. From there on the connection belongs to the service that was asked for. It isn't
encrypted: this keeps strangers out who connect, not those who can change packets on the way.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from typing import Any

from phalanx.key import derived

__all__ = ["Refused", "Stranger", "answer", "as_gate", "as_guest"]

_GREETING = b"phalanx gate 1\n"
_NONCE = 32
_PROOF = hashlib.sha256().digest_size
_KNOWN, _UNKNOWN = b"\1", b"\0"
_MOST = 4096
"""Bytes that a hello may have."""


class Refused(Exception):  # noqa: N818 - a fact that the caller words
    """The other side isn't the gate of this job, or doesn't let this host in: why."""


class Stranger(Exception):  # noqa: N818
    """Who has connected doesn't have the key, or doesn't know how to ask."""


async def as_gate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes
) -> dict[str, Any]:
    """Let a guest prove that it has the key; what it says of itself then.

    Waits as long as the guest likes: the caller has a limit.

    Raises:
        Stranger: It doesn't have it.
        EOFError: It has left.
        OSError: So it has, without a word.
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
    """Tell a guest what is wrong with its hello; empty if nothing is."""
    _say(writer, {"wrong": wrong})


async def as_guest(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, hello: dict[str, Any]
) -> None:
    """Prove to the gate that this host has the key, see that the gate has it, and say hello.

    Raises:
        Refused: Why this host isn't let in.
        EOFError: The gate has closed the connection.
        OSError: So it has, without a word.
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
    return hmac.digest(derived(key, "gate"), who.encode() + gate + guest, hashlib.sha256)


def _say(writer: asyncio.StreamWriter, what: dict[str, Any]) -> None:
    text = json.dumps(what).encode()
    writer.write(len(text).to_bytes(4, "big") + text)


async def _message(reader: asyncio.StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MOST:
        raise Stranger(f"its hello has {size} bytes")
    try:
        said = json.loads(await reader.readexactly(size))
    except (ValueError, RecursionError):  # "[[[[..." is as good as no JSON
        raise Stranger("its hello can't be read") from None
    if not isinstance(said, dict):
        raise Stranger("its hello says nothing")
    return said
