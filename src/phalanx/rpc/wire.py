"""What a message looks like, and what is checked of it before a byte of it is unpickled.

A message is one frame: a head of fixed size, a table of its tensors, a note of the graph, a pickle,
and the data of small tensors. Those of large ones are elsewhere: in memory that sender and receiver
share, or, between hosts, in frames behind this one.
"""

from __future__ import annotations

import enum
import math
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ANSWERS",
    "DTYPES",
    "FRAME",
    "MOST_TENSORS",
    "Kind",
    "Malformed",
    "Message",
    "Place",
    "Row",
    "parse",
    "written",
]

FRAME = 256 * 2**20
"""The largest frame, in bytes: one who announces more is cut off."""

MOST_TENSORS = 2**16 - 1
"""Of a message."""

_HEAD = struct.Struct("<4sBBHIIIQQIII")
_SUM = struct.Struct("<I")
_ROW = struct.Struct("<BBHIIIQ")
_MAGIC = b"PhR1"
_DIMENSIONS = 64
_APART = 1
"""A flag: the last tensor's data are the pickle."""

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
"""Of tensors that travel beside the pickle; a dtype's place is its number in the table."""


class Kind(enum.IntEnum):
    """What a message wants."""

    CALL = 1
    """Execute a function and return its result."""
    REMOTE = 2
    """Execute a function and keep its result; `extra` is the number of its `RRef`."""
    FETCH = 3
    """The value of an `RRef`; the pickle says which."""
    COUNT = 4
    """References to a value that came or went. No answer."""
    ARRIVE = 5
    """A worker has come to the end, or found nothing to do since it last said so."""
    LEAVE = 6
    """A worker leaves without waiting for others. No answer."""
    HELLO = 7
    """Nothing but an answer."""
    RESULT = 8
    FAILURE = 9
    RETURN = 10
    """Blocks that the sender of this couldn't map. No answer."""


ANSWERS = frozenset((Kind.RESULT, Kind.FAILURE))


class Place(enum.IntEnum):
    """Where the data of a tensor are."""

    HERE = 0
    """In the message's own frame."""
    BEHIND = 1
    """In frames behind it."""
    SHARED = 2
    """In memory of the sender that the receiver maps."""


class Malformed(ValueError):  # noqa: N818 - it says what the message is
    """No message of this protocol; it was dropped."""


class Row(NamedTuple):
    """A tensor in the table."""

    dtype: torch.dtype
    place: Place
    shape: tuple[int, ...]
    segment: int = 0
    """The number of the sender's segment, if shared."""
    descriptor: int = 0
    """The sender's, of that segment."""
    block: int = 0
    """Its number in the segment."""

    @property
    def size(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


class Message(NamedTuple):
    """All of a message, checked but for the pickle."""

    kind: Kind
    source: int
    """Who sent it."""
    root: int
    """On whose behalf."""
    call: int
    """Which answer belongs to which call."""
    extra: int
    rows: list[Row]
    note: bytes
    payload: bytes
    here: list[bytes]
    """The data of the tensors that have them in the message itself, in order."""
    behind: Sequence[memoryview]
    """All frames behind it."""
    is_apart: bool = False
    """Whether the last of its tensors is no tensor, but the pickle."""


def written(
    kind: Kind,
    source: int,
    root: int,
    call: int,
    extra: int = 0,
    rows: Sequence[Row] = (),
    note: bytes = b"",
    payload: bytes = b"",
    here: Sequence[bytes] = (),
    is_apart: bool = False,
) -> bytes:
    """The first frame of a message; what its fields mean is told at `Message`."""
    table = b"".join(map(_written_row, rows)) if rows else b""
    head = _HEAD.pack(
        _MAGIC,
        kind,
        _APART if is_apart else 0,
        len(rows),
        source,
        root,
        0,
        call,
        extra,
        len(table),
        len(note),
        len(payload),
    )
    body = b"".join((head, table, note, payload, *here))
    return body + _SUM.pack(zlib.crc32(body))


def parse(frame: bytes, behind: Sequence[memoryview], workers: int) -> Message:
    """Check a message and take it apart.

    Args:
        frame: The first one.
        behind: Those behind it.
        workers: How many there are.

    Raises:
        Malformed: It says what is wrong.
    """
    end = len(frame) - _SUM.size
    if end < _HEAD.size:
        raise Malformed(f"{len(frame)} bytes, too few for a message")
    if not frame.startswith(_MAGIC):
        raise Malformed(f"it begins with {frame[:4]!r}")
    if zlib.crc32(memoryview(frame)[:end]) != _SUM.unpack_from(frame, end)[0]:
        raise Malformed("its checksum is wrong")
    head = _HEAD.unpack_from(frame)
    _, kind, flags, count, source, root, zero, call, extra, table, note, payload = head
    if flags & ~_APART or zero:
        raise Malformed("a field that must be zero isn't")
    try:
        kind = Kind(kind)
    except ValueError:
        raise Malformed(f"no message is of the kind {kind}") from None
    if source >= workers or root >= workers:
        raise Malformed(f"it is from worker {source} for {root} of {workers}")
    if _HEAD.size + table + note + payload > end:
        raise Malformed("its parts are longer than the whole")
    offset = _HEAD.size
    rows = _rows(frame[offset : offset + table], count) if table or count else []
    offset += table
    parts = frame[offset : offset + note], frame[offset + note : offset + note + payload]
    here = _here(frame[offset + note + payload : end], rows)
    _check_behind(rows, behind)
    if flags and (payload or not rows or rows[-1].dtype is not torch.uint8):
        raise Malformed("its pickle is said to be apart, where there is none")
    return Message(kind, source, root, call, extra, rows, *parts, here, behind, bool(flags))


def _written_row(row: Row) -> bytes:
    fixed = _ROW.pack(
        DTYPES.index(row.dtype),
        row.place,
        len(row.shape),
        row.segment,
        row.descriptor,
        row.block,
        row.size,
    )
    return fixed + struct.pack(f"<{len(row.shape)}q", *row.shape)


def _rows(table: bytes, count: int) -> list[Row]:
    rows, offset = [], 0
    try:
        for _ in range(count):
            dtype, place, dimensions, segment, descriptor, block, size = _ROW.unpack_from(
                table, offset
            )
            offset += _ROW.size
            if dimensions > _DIMENSIONS:
                raise Malformed(f"a tensor of {dimensions} dimensions")
            shape = struct.unpack_from(f"<{dimensions}q", table, offset)
            offset += 8 * dimensions
            row = Row(DTYPES[dtype], Place(place), shape, segment, descriptor, block)
            if min(shape, default=0) < 0 or row.size != size:
                raise Malformed(f"a tensor of shape {shape} and {size} bytes")
            rows.append(row)
    except (struct.error, IndexError, ValueError) as error:
        raise error if isinstance(error, Malformed) else Malformed("its table is none") from None
    if offset != len(table):
        raise Malformed("its table is longer than its tensors say")
    return rows


def _here(data: bytes, rows: Sequence[Row]) -> list[bytes]:
    here, offset = [], 0
    for row in rows:
        if row.place is Place.HERE:
            here.append(data[offset : offset + row.size])
            offset += row.size
    if offset != len(data):
        raise Malformed(f"{len(data)} bytes of tensors, where its table says {offset}")
    return here


def _check_behind(rows: Sequence[Row], behind: Sequence[memoryview]) -> None:
    frames = iter(behind)
    for row in rows:
        if row.place is not Place.BEHIND:
            continue
        for at in range(0, row.size, FRAME):
            frame = next(frames, None)
            if frame is None or len(frame) != min(FRAME, row.size - at):
                raise Malformed("the frames behind it aren't those of its table")
    if next(frames, None) is not None:
        raise Malformed("more frames behind it than its table says")
