"""The protocol between processes and the relay: control messages (frames), some with data.

Data are sent only on request, so that neither the relay nor a rank has to buffer more than it has
agreed to. A sender offers a message, and the receiver grants a number of bytes at a time. Small
messages are eager: they are sent with their data and without an offer. The bytes of eager messages
in flight are limited, and the receiver returns credit for the bytes that its recvs have taken.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import zmq

from phalanx.key import derive
from phalanx.system import curve

CHANNEL_BYTES = 16
MAX_DATA_BYTES = 256 * 2**10
"""The maximum size of the data of a frame in bytes."""
CONNECT_SECONDS = 20.0
"""The longest time that a process may take to connect to the relay, in seconds."""
_HEARTBEAT_MILLISECONDS = 2_000
_TIMEOUT_MILLISECONDS = 10_000
_LAYOUT = struct.Struct(f"!B{CHANNEL_BYTES}siIQQ")


class Kind(enum.IntEnum):
    """The kind of a frame. Below, "the rank" is `Frame.peer`."""

    # To the relay.
    JOIN = 1
    """This process joins the channel as the rank; the value is the number of the group's ranks."""
    SUBSCRIBE = 2
    """A request to report when the rank is present, and when it is gone."""
    LEAVE = 3
    """This process leaves the channel; the value is a `LeaveReason`."""
    PROBE = 13
    """A request to send the same frame back, to a process in any channel or none."""

    # From the relay.
    PRESENT = 4
    """The rank is present."""
    GONE = 5
    """The rank is gone; the value is a `LeaveReason`."""

    # From rank to rank.
    EAGER = 6
    """A message with its data."""
    CREDIT = 7
    """Recvs have taken eager messages; the value is their bytes."""
    OFFER = 8
    """An offer of a message with a number; the value is its size in bytes."""
    GRANT = 9
    """A request for data of a message; the value is the offset up to which to send."""
    DATA = 10
    """Data of a message; the value is their offset."""
    DONE = 11
    """All data of a message have arrived."""
    REJECT = 12
    """The recv that matches a message has a different size."""


class LeaveReason(enum.IntEnum):
    """The reason why a rank is no longer in a channel."""

    DIED = 0
    CLOSED = 1
    ABORTED = 2


class Frame(NamedTuple):
    """A control message; its data, if any, are in a second frame of the same ZeroMQ message.

    Attributes:
        kind: The kind of the frame.
        channel: The identifier of the group's channel, of `CHANNEL_BYTES` bytes.
        peer: The rank that the frame is about, to, or from.
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
        """Return the frame as bytes."""
        return _LAYOUT.pack(*self)

    @classmethod
    def parse(cls, data: bytes) -> Frame:
        """Parse the bytes that `pack` returned.

        Raises:
            ValueError: The bytes are not a frame.
        """
        try:
            kind, *rest = _LAYOUT.unpack(data)
        except struct.error as error:
            raise ValueError(str(error)) from None
        return cls(Kind(kind), *rest)


def configure(
    socket: zmq.Socket[bytes], endpoint: str, own: curve.KeyPair, server: bytes = b""
) -> None:
    """Prepare a socket of the relay or of a client; for the arguments see `curve.configure`."""
    curve.configure(
        socket,
        endpoint,
        own,
        server,
        max_size=2 * MAX_DATA_BYTES,
        heartbeat=_HEARTBEAT_MILLISECONDS,
        timeout=_TIMEOUT_MILLISECONDS,
    )


def server_key_pair(key: bytes) -> curve.KeyPair:
    """Return the key pair of the relay; only processes of the job can derive it."""
    return curve.make_key_pair(derive(key, "relay server"))


def client_key_pair(key: bytes) -> curve.KeyPair:
    """Return the key pair that all clients of the relay share."""
    return curve.make_key_pair(derive(key, "relay client"))
