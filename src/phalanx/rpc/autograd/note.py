"""What goes along with tensors that travel, so that gradients find the way back."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["Note", "Source", "packed", "unpacked"]

_HEAD = struct.Struct("<QII")
_INDEX = struct.Struct("<I")
_SOURCE = struct.Struct("<IQI")


class Source(NamedTuple):
    """A tensor that travelled, by whom it was sent, in which of its messages, as which in there."""

    owner: int
    number: int
    place: int


class Note(NamedTuple):
    """Of one message, a request or a reply.

    Attributes:
        number: The message's, unique at the worker that sends it.
        indices: Which of its tensors require gradients.
        reach: Tensors that travelled before, on which these depend: those of the receiver, that its
            graph is to be tied to, and those of others, of whom it may have to tell in its turn.
    """

    number: int
    indices: tuple[int, ...]
    reach: tuple[Source, ...]


def packed(note: Note) -> bytes:
    """The bytes of a note."""
    head = _HEAD.pack(note.number, len(note.indices), len(note.reach))
    indices = (_INDEX.pack(index) for index in note.indices)
    return b"".join((head, *indices, *(_SOURCE.pack(*source) for source in note.reach)))


def unpacked(data: bytes, tensors: int) -> Note:
    """The note of a message of so many tensors.

    Raises:
        ValueError: It isn't one.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"a note of {len(data)} bytes: expected at least {_HEAD.size}")
    number, indices, sources = _HEAD.unpack_from(data)
    middle = _HEAD.size + indices * _INDEX.size
    end = middle + sources * _SOURCE.size
    if len(data) != end:
        raise ValueError(f"a note of {len(data)} bytes: its head speaks of {end}")
    which = tuple(index for (index,) in _INDEX.iter_unpack(data[_HEAD.size : middle]))
    if not which or max(which) >= tensors or len(set(which)) < len(which):
        raise ValueError(f"a note on the tensors {which} of a message of {tensors}")
    return Note(number, which, tuple(map(Source._make, _SOURCE.iter_unpack(data[middle:]))))
