"""The protocol between processes and the relay: control messages (words), some with data.

Data move only on request, so that neither the relay nor a rank has to buffer more than it has
agreed to. A sender offers a message, and the receiver grants a number of bytes at a time. The data
of a small message come without an offer. The bytes of small messages in flight are limited, and
the receiver reports the bytes that its recvs have taken.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

__all__ = ["CHANNEL_BYTES", "HIGHEST_TAG", "Ending", "Kind", "Word"]

CHANNEL_BYTES = 16
HIGHEST_TAG = 2**31 - 1
_FORM = struct.Struct(f"!B{CHANNEL_BYTES}siIQQ")


class Kind(enum.IntEnum):
    """The kind of a word. Below, "the rank" is `Word.peer`."""

    # To the relay.
    ENTER = 1
    """This process is the rank."""
    SEEK = 2
    """A request to report when the rank is present, and when it is gone."""
    LEAVE = 3
    """This process leaves the channel; the value is an `Ending`."""

    # From the relay.
    THERE = 4
    """The rank is present."""
    GONE = 5
    """The rank is gone; the value is an `Ending`."""

    # From rank to rank.
    SMALL = 6
    """A message with its data."""
    TAKEN = 7
    """Recvs have taken small messages; the value is their bytes."""
    OFFER = 8
    """An offer of a message with a number; the value is its size in bytes."""
    GRANT = 9
    """A request for data of a message; the value is the offset up to which to send."""
    DATA = 10
    """Data of a message; the value is their offset."""
    DONE = 11
    """All data of a message have arrived."""
    REFUSE = 12
    """The recv that matches a message has another size."""


class Ending(enum.IntEnum):
    """The way in which a rank left a channel."""

    DIED = 0
    CLOSED = 1
    ABORTED = 2


class Word(NamedTuple):
    """A control message in one frame; its data, if any, are in a second frame.

    Attributes:
        kind: The kind of the word.
        channel: The identifier of the group's channel, `CHANNEL_BYTES` long.
        peer: The rank that the word is about, for, or from.
        tag: The tag of a message.
        number: The number of an offered message among those of its sender to its receiver.
        value: A number that depends on the kind.
    """

    kind: Kind
    channel: bytes
    peer: int
    tag: int = 0
    number: int = 0
    value: int = 0

    def pack(self) -> bytes:
        """Return the frame."""
        return _FORM.pack(*self)

    @classmethod
    def parse(cls, frame: bytes) -> Word:
        """Parse a frame.

        Raises:
            ValueError: The frame is not a word.
        """
        try:
            kind, *rest = _FORM.unpack(frame)
        except struct.error as error:
            raise ValueError(str(error)) from None
        return cls(Kind(kind), *rest)
