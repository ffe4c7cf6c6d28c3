"""What goes through ssh between the shell and the launcher on a host: a message per line.

A message is JSON behind a mark, so that it can be told from what a host's shell prints at login.
Towards the host go `start`, once, then `stop` with a signal, and empty lines that say that the
shell is still there. From it come `hello`, `output`, and `end`. So the environment, the arguments
and the job's secrets come on no command line, and through no shell's quoting.
"""

import json
from typing import Any

__all__ = ["BEAT", "SILENCE", "Lines", "pack", "unpack"]

BEAT = 5.0
"""Seconds between two signs of life of the shell."""
SILENCE = 60.0
"""Seconds without any, after which a host takes the shell for gone."""

_MARK = b"\x1ephalanx "


def pack(kind: str, **content: Any) -> bytes:
    """A message as a line."""
    # The first comes behind what a shell prints at login, which may lack its line end.
    return (
        (b"\n" if kind == "hello" else b"")
        + _MARK
        + json.dumps({"kind": kind, **content}).encode()
        + b"\n"
    )


def unpack(line: bytes) -> dict[str, Any] | None:
    """The message of a line; None if it is none."""
    if not line.startswith(_MARK):
        return None
    try:
        message = json.loads(line[len(_MARK) :])
    except ValueError:
        return None
    return message if isinstance(message, dict) and "kind" in message else None


class Lines:
    """Cuts what comes through a pipe into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now, with their ends."""
        *lines, self._rest = (self._rest + data).splitlines(keepends=True) or [b""]
        if self._rest.endswith(b"\n"):
            lines.append(self._rest)
            self._rest = b""
        return lines

    def rest(self) -> list[bytes]:
        """What has no end, when nothing more comes."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []
