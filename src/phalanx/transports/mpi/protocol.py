"""The control messages of processes over MPI.

MPI has too few tags for all groups and their tags, and it cannot withdraw a transfer. So transfers
are matched in this package. A small transfer is one eager message. A large one is offered, and MPI
holds its data only between the receiver's request and their arrival.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

__all__ = ["MAX_EAGER_BYTES", "MAX_MESSAGE_BYTES", "Kind", "Message"]

_LAYOUT = struct.Struct("<QBiiQQ")
MAX_EAGER_BYTES = 4000
"""The maximum size in bytes of a transfer that is sent eagerly, in one message.

With its header, the message is smaller than the 4 KiB that MPI libraries send eagerly.
"""
MAX_MESSAGE_BYTES = _LAYOUT.size + MAX_EAGER_BYTES
"""The maximum size of a message in bytes."""


class Kind(IntEnum):
    """The kind of a message."""

    HELLO = 1
    """The sender has looked up the receiver, and is to receive CLOSED when the receiver ends."""
    EAGER = 2
    """A transfer with all its bytes."""
    OFFER = 3
    """A transfer whose bytes stay with the sender."""
    REQUEST = 4
    """A request for the bytes of an offer, whose receive is posted."""
    CANCELLED = 5
    """The requested bytes will not be sent."""
    CLOSED = 6
    """The sender's transport has ended; this is its last message."""


class Message(NamedTuple):
    """A message from one rank of a group to another."""

    transport: int
    """The name of the transport, the same on all ranks of the group."""
    kind: Kind
    rank: int
    """The sender's rank in the group."""
    tag: int = 0
    """The tag of a transfer; for REQUEST and CANCELLED, the MPI tag of its bytes."""
    number: int = 0
    """The number of an offer, among those of its sender to its receiver."""
    size: int = 0
    """The size of an offer in bytes."""
    payload: bytes = b""

    def pack(self) -> bytes:
        """Return the message as bytes, at most `MAX_MESSAGE_BYTES`."""
        return _LAYOUT.pack(*self[:6]) + self.payload

    @classmethod
    def parse(cls, data: memoryview) -> Message:
        """Parse the bytes that `pack` returned."""
        transport, kind, rank, tag, number, size = _LAYOUT.unpack_from(data)
        payload = bytes(data[_LAYOUT.size :])
        return cls(transport, Kind(kind), rank, tag, number, size, payload)
