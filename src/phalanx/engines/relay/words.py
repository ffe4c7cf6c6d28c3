"""What processes and the relay say to each other: a word each, some with data behind it.

Data move when they are asked for, so that neither the relay nor a rank has to keep more than what
it has agreed to: a sender makes an offer, the receiver grants so many bytes at a time. Small ones
come with the offer, up to what a receiver has said that it has taken.
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
    """What a word says. Where it names a rank: whom it is for, or from whom it comes."""

    # To the relay.
    ENTER = 1
    """This process is the rank."""
    SEEK = 2
    """Say when the rank is there, and when it is gone."""
    LEAVE = 3
    """This process is no longer in the channel: value is an `Ending`."""

    # From the relay.
    THERE = 4
    """The rank is there."""
    GONE = 5
    """It no longer is: value is an `Ending`."""

    # From rank to rank.
    SMALL = 6
    """A message, with its data."""
    TAKEN = 7
    """So many bytes of small messages have found their recvs: value."""
    OFFER = 8
    """A message: its number, and its size as value."""
    GRANT = 9
    """Send data of that message, up to the offset in value."""
    DATA = 10
    """Data of that message, from the offset in value on."""
    DONE = 11
    """All of that message has come."""
    REFUSE = 12
    """The recv for that message has another size."""


class Ending(enum.IntEnum):
    """How a rank left a channel."""

    DIED = 0
    CLOSED = 1
    ABORTED = 2


class Word(NamedTuple):
    """One word, in one frame; data are in a second one.

    Attributes:
        kind: What it says.
        channel: Which group's engine it is for.
        peer: A rank of the group.
        tag: Of a message.
        number: Of a message, among those of its sender to this receiver.
        value: What the kind says.
    """

    kind: Kind
    channel: bytes
    peer: int
    tag: int = 0
    number: int = 0
    value: int = 0

    def pack(self) -> bytes:
        """The frame."""
        return _FORM.pack(*self)

    @classmethod
    def parse(cls, frame: bytes) -> Word:
        """From a frame.

        Raises:
            ValueError: It is none of a word.
        """
        try:
            kind, *rest = _FORM.unpack(frame)
        except struct.error as error:
            raise ValueError(str(error)) from None
        return cls(Kind(kind), *rest)
