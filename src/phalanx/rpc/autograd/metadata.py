"""The autograd metadata of a message, by which gradients return to the sender."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["AutogradMetadata", "Source", "pack_metadata", "read_number", "unpack_metadata"]

_HEADER = struct.Struct("<QII")
_INDEX = struct.Struct("<I")
_SOURCE = struct.Struct("<IQI")


class Source(NamedTuple):
    """A tensor that was sent, identified by its sender, its message and its index there."""

    owner: int
    number: int
    tensor_index: int


class AutogradMetadata(NamedTuple):
    """The metadata of one message, a request or a reply.

    Attributes:
        number: The message's number, unique at its sender.
        indices: Indices of the message's tensors that require gradients.
        dependencies: Tensors sent earlier on which these depend. The receiver connects its graph to
            those that it sent itself, and passes the others on in metadata of its own.
    """

    number: int
    indices: tuple[int, ...]
    dependencies: tuple[Source, ...]


def pack_metadata(metadata: AutogradMetadata) -> bytes:
    """Serialize metadata."""
    head = _HEADER.pack(metadata.number, len(metadata.indices), len(metadata.dependencies))
    indices = (_INDEX.pack(index) for index in metadata.indices)
    return b"".join((head, *indices, *(_SOURCE.pack(*source) for source in metadata.dependencies)))


def read_number(data: bytes) -> int:
    """Return the message number in packed metadata."""
    number: int = _HEADER.unpack_from(data)[0]
    return number


def unpack_metadata(data: bytes, tensors: int) -> AutogradMetadata:
    """Deserialize the metadata of a message.

    Args:
        data: The packed metadata.
        tensors: The number of tensors in the message.

    Raises:
        ValueError: The data is not metadata of such a message.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"metadata of {len(data)} bytes: expected at least {_HEADER.size}")
    number, index_count, source_count = _HEADER.unpack_from(data)
    sources_offset = _HEADER.size + index_count * _INDEX.size
    end = sources_offset + source_count * _SOURCE.size
    if len(data) != end:
        raise ValueError(f"metadata of {len(data)} bytes: its header declares {end}")
    indices = tuple(index for (index,) in _INDEX.iter_unpack(data[_HEADER.size : sources_offset]))
    if not indices or max(indices) >= tensors or len(set(indices)) < len(indices):
        raise ValueError(f"metadata for the tensors {indices} of a message with {tensors}")
    return AutogradMetadata(
        number, indices, tuple(map(Source._make, _SOURCE.iter_unpack(data[sources_offset:])))
    )
