"""The protocol between the local launcher and the launcher on a host: one message per line.

A message is JSON behind a mark, which distinguishes it from the login output of the host's shell.
The local launcher sends `start` once, then `stop` with a signal, and empty lines as heartbeats.
The host sends `hello`, `output` and `end`. The environment, the arguments and the job's secrets
therefore appear on no command line and need no shell quoting.
"""

import json
from typing import Any

HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats of the local launcher."""
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which a host considers the local launcher lost."""

_MARK = b"\x1ephalanx "


def pack(kind: str, **content: Any) -> bytes:
    """Encode a message as a line."""
    # The first message follows the login output of the shell, which may not end with a newline.
    return (
        (b"\n" if kind == "hello" else b"")
        + _MARK
        + json.dumps({"kind": kind, **content}).encode()
        + b"\n"
    )


def unpack(line: bytes) -> dict[str, Any] | None:
    """Decode a line; return None if it is not a message."""
    if not line.startswith(_MARK):
        return None
    try:
        message = json.loads(line[len(_MARK) :])
    except ValueError:
        return None
    return message if isinstance(message, dict) and "kind" in message else None
