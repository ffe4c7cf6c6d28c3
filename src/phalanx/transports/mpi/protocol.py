"""The control messages of processes over MPI.

MPI has too few tags for all groups and their tags, and it cannot take back a transfer. So transfers
are matched in this package. A small transfer is a text message. A large one is offered, and MPI
holds its data only between the receiver's request and their arrival.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

__all__ = ["MOST_BYTES", "MOST_TEXT", "Kind", "Message"]

_LAYOUT = struct.Struct("<QBiiQQ")
MOST_TEXT = 4000
"""Most bytes of a transfer that is sent as a text.

With the header it is less than the 4 KiB that MPI libraries send eagerly.
"""
MOST_BYTES = _LAYOUT.size + MOST_TEXT
"""Most bytes of a message."""


class Kind(IntEnum):
    """The kind of a message."""

    HELLO = 1
    """The sender knows the receiver from now on, and wants to be told of its end."""
    TEXT = 2
    """A transfer with all its bytes."""
    OFFER = 3
    """A transfer whose bytes stay with the sender."""
    ASK = 4
    """A request for the bytes of an offer, whose receive is posted."""
    REFUSED = 5
    """The requested bytes will not come."""
    GONE = 6
    """The sender's transport has ended; nothing comes after this."""


class Message(NamedTuple):
    """A message from one rank of a group to another."""

    transport: int
    """The name of the transport, the same on all ranks of the group."""
    kind: Kind
    rank: int
    """The sender's rank in the group."""
    tag: int = 0
    """The tag of a transfer; for ASK and REFUSED, the MPI tag of its bytes."""
    number: int = 0
    """The number of an offer, among those of its sender to its receiver."""
    size: int = 0
    """The size of an offer in bytes."""
    text: bytes = b""

    def pack(self) -> bytes:
        """Return the message as bytes, at most `MOST_BYTES`."""
        return _LAYOUT.pack(*self[:6]) + self.text

    @classmethod
    def parse(cls, data: memoryview) -> Message:
        """Parse the bytes that `pack` returned."""
        transport, kind, rank, tag, number, size = _LAYOUT.unpack_from(data)
        text = bytes(data[_LAYOUT.size :])
        return cls(transport, Kind(kind), rank, tag, number, size, text)
