"""The format of a message, and its checks before a byte of it is unpickled.

A message is one frame: a head of fixed size, a table of its tensors, metadata of autograd, a
pickle, the data of small tensors, and a checksum. The data of large tensors are elsewhere: in
memory that sender and receiver share, or, between hosts, in frames that follow this one.
"""

from __future__ import annotations

import enum
import math
import struct
import zlib
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

Frames = tuple[bytes, "list[memoryview]"]
"""The frames of a message: the first one, and those that follow it."""

MAX_FRAME_SIZE = 256 * 2**20
"""The maximum size of a frame, in bytes; a peer that announces more is disconnected."""

MAX_TENSORS = 2**16 - 1
"""The maximum number of tensors in a message."""

MAX_WORKERS = 2**16
"""The maximum number of workers; the upper bits of unique numbers hold a worker's id."""

_HEADER = struct.Struct("<4sBBHIIQQIII")
_CHECKSUM = struct.Struct("<I")
_DESCRIPTOR = struct.Struct("<BBHIIIQ")
_MAGIC = b"PhR2"
_DIMENSIONS = 64
_STRIDED = 0x80
"""A flag in the location field of a tensor: its strides follow its shape."""
_PICKLE_IN_TENSOR = 1
"""A flag: the data of the last tensor are the pickle."""

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
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
"""The dtypes of tensors outside the pickle; the index of a dtype is its number in the table."""

WITHOUT_NUMPY = frozenset(
    (torch.bfloat16, torch.complex32, *(each for each in DTYPES if "float8" in str(each)))
)
"""Those that NumPy lacks."""


class Kind(enum.IntEnum):
    """The kind of a message."""

    CALL = 1
    """Execute a function and return its result."""
    REMOTE = 2
    """Execute a function and keep its result; `extra` is the number of its `RRef`."""
    FETCH = 3
    """Return the value of an `RRef`, which the pickle names."""
    REF_COUNT = 4
    """Count new or ended references to a value. No answer."""
    ARRIVE = 5
    """Report arrival at a barrier: in `init_rpc`, or in `shutdown` with nothing left to do."""
    LEAVE = 6
    """Report that a worker leaves without waiting for others. No answer."""
    HELLO = 7
    """Do nothing but answer."""
    RESULT = 8
    FAILURE = 9
    FREE_BLOCKS = 10
    """Take back blocks that the sender of this message could not map. No answer."""


ANSWERS = frozenset((Kind.RESULT, Kind.FAILURE))


class TensorLocation(enum.IntEnum):
    """The location of a tensor's data."""

    INLINE = 0
    """In the message's own frame."""
    OUT_OF_BAND = 1
    """In frames that follow the message."""
    SHARED = 2
    """In memory of the sender, which the receiver maps."""


class Malformed(ValueError):  # noqa: N818 - the state of the message
    """Not a valid message of this protocol; it was dropped."""


class TensorDescriptor(NamedTuple):
    """An entry of the table of tensors."""

    dtype: torch.dtype
    location: TensorLocation
    shape: tuple[int, ...]
    segment: int = 0
    """The number of the sender's segment, if the data are shared."""
    fd: int = 0
    """The sender's descriptor of that segment."""
    block: int = 0
    """The number of the block in the segment."""
    strides: tuple[int, ...] | None = None
    """The strides in elements; None if the tensor is contiguous."""
    storage_numel: int = 0
    """If there are strides: the number of elements that are sent, with those in the gaps."""

    @property
    def size(self) -> int:
        """The size of the data, in bytes."""
        count = math.prod(self.shape) if self.strides is None else self.storage_numel
        return count * self.dtype.itemsize


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first one to its last one in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class Message(NamedTuple):
    """A whole message, checked except for the pickle."""

    kind: Kind
    source: int
    """The id of the sender."""
    call: int
    """The number that matches an answer with its call."""
    extra: int
    descriptors: list[TensorDescriptor]
    metadata: bytes
    payload: bytes
    inline_data: list[bytes]
    """The data of the tensors that are in the message itself, in order."""
    out_of_band: Sequence[memoryview]
    """All frames that follow the message."""
    is_pickle_in_tensor: bool = False
    """True if the last of its tensors is the pickle."""


def encode_frame(
    kind: Kind,
    source: int,
    call: int = 0,
    extra: int = 0,
    descriptors: Sequence[TensorDescriptor] = (),
    metadata: bytes = b"",
    payload: bytes = b"",
    inline_data: Sequence[bytes] = (),
    is_pickle_in_tensor: bool = False,
) -> bytes:
    """Return the first frame of a message; for the fields see `Message`."""
    table = b"".join(map(_encode_descriptor, descriptors)) if descriptors else b""
    header = _HEADER.pack(
        _MAGIC,
        kind,
        _PICKLE_IN_TENSOR if is_pickle_in_tensor else 0,
        len(descriptors),
        source,
        0,
        call,
        extra,
        len(table),
        len(metadata),
        len(payload),
    )
    body = b"".join((header, table, metadata, payload, *inline_data))
    return body + _CHECKSUM.pack(zlib.crc32(body))


def parse(frame: bytes, out_of_band: Sequence[memoryview], workers: Container[int]) -> Message:
    """Check a message and take it apart.

    Args:
        frame: The first frame.
        out_of_band: The frames that follow it.
        workers: The ids of the workers.

    Raises:
        Malformed: The message is invalid; the error says why.
    """
    end = len(frame) - _CHECKSUM.size
    if end < _HEADER.size:
        raise Malformed(f"{len(frame)} bytes, too few for a message")
    if not frame.startswith(_MAGIC):
        raise Malformed(f"it begins with {frame[:4]!r}")
    if zlib.crc32(memoryview(frame)[:end]) != _CHECKSUM.unpack_from(frame, end)[0]:
        raise Malformed("its checksum is wrong")
    header = _HEADER.unpack_from(frame)
    _, kind, flags, count, source, reserved, call, extra, table, metadata, payload = header
    if flags & ~_PICKLE_IN_TENSOR or reserved:
        raise Malformed("a reserved field is not zero")
    try:
        kind = Kind(kind)
    except ValueError:
        raise Malformed(f"unknown message kind {kind}") from None
    if source not in workers:
        raise Malformed(f"no worker has the id {source} of its sender")
    if _HEADER.size + table + metadata + payload > end:
        raise Malformed("its parts are longer than the message")
    offset = _HEADER.size
    parts = []
    for size in (table, metadata, payload):
        parts.append(frame[offset : offset + size])
        offset += size
    encoded_table, encoded_metadata, encoded_payload = parts
    descriptors = _parse_descriptors(encoded_table, count) if table or count else []
    inline_data = _split_inline_data(frame[offset:end], descriptors)
    _check_out_of_band(descriptors, out_of_band)
    if flags and (payload or not descriptors or descriptors[-1].dtype is not torch.uint8):
        raise Malformed("its last tensor should hold its pickle, but does not")
    return Message(
        kind,
        source,
        call,
        extra,
        descriptors,
        encoded_metadata,
        encoded_payload,
        inline_data,
        out_of_band,
        bool(flags),
    )


def _encode_descriptor(descriptor: TensorDescriptor) -> bytes:
    strides = descriptor.strides or ()
    fixed = _DESCRIPTOR.pack(
        DTYPES.index(descriptor.dtype),
        descriptor.location | (_STRIDED if strides else 0),
        len(descriptor.shape),
        descriptor.segment,
        descriptor.fd,
        descriptor.block,
        descriptor.size,
    )
    return fixed + struct.pack(
        f"<{len(descriptor.shape) + len(strides)}q", *descriptor.shape, *strides
    )


def _parse_descriptors(table: bytes, count: int) -> list[TensorDescriptor]:
    descriptors, offset = [], 0
    try:
        for _ in range(count):
            dtype, location_field, dimensions, segment, fd, block, size = _DESCRIPTOR.unpack_from(
                table, offset
            )
            offset += _DESCRIPTOR.size
            if dimensions > _DIMENSIONS:
                raise Malformed(f"a tensor of {dimensions} dimensions")
            shape = struct.unpack_from(f"<{dimensions}q", table, offset)
            offset += 8 * dimensions
            strides, storage_numel = None, 0
            if location_field & _STRIDED:
                strides = struct.unpack_from(f"<{dimensions}q", table, offset)
                offset += 8 * dimensions
                storage_numel = size // DTYPES[dtype].itemsize
            location = TensorLocation(location_field & ~_STRIDED)
            descriptor = TensorDescriptor(
                DTYPES[dtype], location, shape, segment, fd, block, strides, storage_numel
            )
            is_inside = strides is None or (
                min(strides, default=0) >= 0 and span(shape, strides) <= storage_numel
            )
            if min(shape, default=0) < 0 or descriptor.size != size or not is_inside:
                raise Malformed(f"a tensor of shape {shape}, strides {strides} and {size} bytes")
            descriptors.append(descriptor)
    except (struct.error, IndexError, ValueError) as error:
        raise (
            error if isinstance(error, Malformed) else Malformed("its tensor table is invalid")
        ) from None
    if offset != len(table):
        raise Malformed("its tensor table is longer than its descriptors")
    return descriptors


def _split_inline_data(data: bytes, descriptors: Sequence[TensorDescriptor]) -> list[bytes]:
    inline_data, offset = [], 0
    for descriptor in descriptors:
        if descriptor.location is TensorLocation.INLINE:
            inline_data.append(data[offset : offset + descriptor.size])
            offset += descriptor.size
    if offset != len(data):
        raise Malformed(f"{len(data)} bytes of inline tensors, but its table declares {offset}")
    return inline_data


def _check_out_of_band(
    descriptors: Sequence[TensorDescriptor], out_of_band: Sequence[memoryview]
) -> None:
    frames = iter(out_of_band)
    for descriptor in descriptors:
        if descriptor.location is not TensorLocation.OUT_OF_BAND:
            continue
        for at in range(0, descriptor.size, MAX_FRAME_SIZE):
            frame = next(frames, None)
            if frame is None or len(frame) != min(MAX_FRAME_SIZE, descriptor.size - at):
                raise Malformed("its out-of-band frames do not match its tensor table")
    if next(frames, None) is not None:
        raise Malformed("more out-of-band frames than its tensor table declares")
