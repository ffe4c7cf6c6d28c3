"""What processes tell each other over MPI, beside the data.

MPI matches by numbers that are too few for all groups and tags, and can take nothing back. So
transfers are matched here: a small one is a text; a large one is offered, and its data are in MPI's
hands only between the receiver's asking for them and their arrival.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

__all__ = ["MOST_BYTES", "MOST_TEXT", "Kind", "Message"]

_LAYOUT = struct.Struct("<QBiiQQ")
MOST_TEXT = 4000
"""Bytes of a transfer that goes as a text: with what is before it, less than the 4 KiB that MPI
libraries send without asking."""
MOST_BYTES = _LAYOUT.size + MOST_TEXT
"""Of a message."""


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    """The sender knows this rank from now on, and wants to hear of its end."""
    TEXT = 2
    """A transfer with all its bytes."""
    OFFER = 3
    """A transfer whose bytes stay with the sender."""
    ASK = 4
    """The receiver of an offer waits for its bytes."""
    REFUSED = 5
    """What was asked for doesn't come."""
    GONE = 6
    """The sender's engine has ended; nothing comes after this."""


class Message(NamedTuple):
    """One message, from a rank of a group to another."""

    engine: int
    """What all ranks of a group call this engine of theirs."""
    kind: Kind
    rank: int
    """The sender, in the group."""
    tag: int = 0
    """Of a transfer; of what is asked for or refused, the tag of its bytes for MPI."""
    number: int = 0
    """Of an offer, among all of its sender."""
    size: int = 0
    """Of what is offered, in bytes."""
    text: bytes = b""

    def pack(self) -> bytes:
        """As bytes, at most `MOST_BYTES`."""
        return _LAYOUT.pack(*self[:6]) + self.text

    @classmethod
    def parse(cls, data: memoryview) -> Message:
        """From what `pack` made."""
        engine, kind, rank, tag, number, size = _LAYOUT.unpack_from(data)
        text = bytes(data[_LAYOUT.size :])
        return cls(engine, Kind(kind), rank, tag, number, size, text)
