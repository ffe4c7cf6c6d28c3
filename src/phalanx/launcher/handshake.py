"""The start of a connection to the tunnel server: authentication by the job's key, then a hello.

After the handshake (`phalanx.system.authentication`), the client sends a hello with its description
and the service it requests, and the server replies with an error or an empty text. After that the
connection belongs to the requested service. It is not encrypted.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from phalanx.key import derive
from phalanx.system.authentication import (
    AuthenticationError,
    Handshake,
    ProtocolMismatch,
    WrongKey,
)

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

__all__ = [
    "HandshakeError",
    "RejectedError",
    "authenticate_client",
    "authenticate_to_server",
    "send_reply",
]

_PROTOCOL = b"phalanx tunnel 2\n"
_MAX_HELLO_BYTES = 4096
"""The maximum size of a hello, in bytes."""


class RejectedError(Exception):
    """The peer is not the tunnel server of this job, or rejects this host; the message says why."""


class HandshakeError(Exception):
    """The peer does not have the key, or does not follow the protocol."""


async def authenticate_client(
    reader: StreamReader, writer: StreamWriter, key: bytes
) -> dict[str, Any]:
    """Authenticate a client and return its hello.

    Has no timeout; the caller sets one.

    Raises:
        HandshakeError: The client does not have the key, or its hello is invalid.
        EOFError: The client has closed the connection.
        OSError: The connection is broken.
    """
    try:
        await _authenticate(reader, writer, make_handshake(key, is_initiator=False))
    except AuthenticationError:
        raise HandshakeError("it has a different key or none") from None
    return await _receive(reader)


def send_reply(writer: StreamWriter, error: str) -> None:
    """Reply to a client's hello with an error; empty if the hello is accepted."""
    _send(writer, {"error": error})


async def authenticate_to_server(
    reader: StreamReader, writer: StreamWriter, key: bytes, hello: dict[str, Any]
) -> None:
    """Authenticate this host and the tunnel server to each other, and send a hello.

    Raises:
        RejectedError: The server rejects this host, or is not the one of this job.
        EOFError: The server has closed the connection.
        OSError: The connection is broken.
    """
    handshake = make_handshake(key, is_initiator=True)
    try:
        await _authenticate(reader, writer, handshake)
    except ProtocolMismatch:
        raise RejectedError(
            "the program there is not `phalanx run`, or is a different version"
        ) from None
    except WrongKey:
        writer.write(handshake.refuse())  # the server reports it too
        raise RejectedError(
            "the two hosts have different keys, or only one of them has a key"
        ) from None
    _send(writer, hello)
    try:
        reply = await _receive(reader)
    except HandshakeError as error:
        raise RejectedError(f"{error}") from None
    if reply.get("error"):
        raise RejectedError(str(reply["error"]))


def make_handshake(key: bytes, *, is_initiator: bool) -> Handshake:
    """Return one side of the handshake; the client is the initiator."""
    return Handshake(derive(key, "tunnel"), _PROTOCOL, is_initiator=is_initiator)


async def _authenticate(reader: StreamReader, writer: StreamWriter, handshake: Handshake) -> None:
    writer.write(handshake.begin())
    while handshake.missing:
        # Less than what is missing can be enough to notice another protocol.
        data = await reader.read(handshake.missing)
        if not data:
            raise EOFError("the connection was closed during the handshake")
        writer.write(handshake.receive(data))


def _send(writer: StreamWriter, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    writer.write(len(text).to_bytes(4, "big") + text)


async def _receive(reader: StreamReader) -> dict[str, Any]:
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
