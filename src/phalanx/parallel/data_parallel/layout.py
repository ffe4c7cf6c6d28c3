"""Where each parameter lies in the memory of a model, and which rank owns what.

Parameters of one dtype lie one after another, in the reverse of the module's order, which is about
that in which a backward pass makes their gradients. They are cut into chunks, what is reduced at
once, and each chunk into equal slices, one for each owner. Slices are whole pages, so that no page
has two owners.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.parallel.data_parallel.linear import by_rows

__all__ = ["PAGE", "Chunk", "Layout", "Piece", "Spot", "lay_out"]

PAGE = 4096
# Where a parameter begins: vector instructions then treat its elements as in a tensor of its own.
_ALIGNED = 64
# Up to this size a matrix isn't cut, so that a product can be written straight to its place.
WHOLE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Spot:
    """Where a parameter lies: in bytes from the beginning of the memory."""

    start: int
    bytes: int

    @property
    def end(self) -> int:
        """Of its last byte, plus one."""
        return self.start + self.bytes


@dataclass(frozen=True)
class Piece:
    """A run of a parameter's elements that one rank owns: at bytes `start` to `end` of it all."""

    parameter: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """What is reduced at once: bytes `start` to `end`, of one dtype."""

    start: int
    end: int
    dtype: torch.dtype


class Layout:
    """Where the parameters of a model lie.

    Args:
        spots: Of each parameter, by number, and of the marks: an element for each parameter.
        dtypes: Of each of these.
        order: Their numbers, as they lie in memory; the marks come last.
        chunks: All of it, one after another.
        owners: Among how many ranks each chunk is divided.
    """

    def __init__(
        self,
        spots: Sequence[Spot],
        dtypes: Sequence[torch.dtype],
        order: Sequence[int],
        chunks: Sequence[Chunk],
        owners: int,
    ) -> None:
        self.spots = tuple(spots)
        self.dtypes = tuple(dtypes)
        self.order = tuple(order)
        self.chunks = tuple(chunks)
        self.owners = owners

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return self.chunks[-1].end

    def slices(self, owner: int) -> Iterator[Chunk]:
        """An owner's slice of each chunk."""
        for chunk in self.chunks:
            size = (chunk.end - chunk.start) // self.owners
            start = chunk.start + owner * size
            yield Chunk(start, start + size, chunk.dtype)

    def pieces(self, owner: int) -> list[Piece]:
        """What an owner has of each parameter: no piece crosses a parameter's end or a slice's."""
        order = self.order[:-1]
        made = []
        first = 0
        for cut in self.slices(owner):
            while first < len(order) and self.spots[order[first]].end <= cut.start:
                first += 1
            for number in order[first:]:
                spot = self.spots[number]
                if spot.start >= cut.end:
                    break
                piece = Piece(number, max(cut.start, spot.start), min(cut.end, spot.end))
                if piece.start < piece.end:
                    made.append(piece)
        return made


def lay_out(parameters: Sequence[Tensor], owners: int, chunk_bytes: int) -> Layout:
    """Lay out parameters, each with its shape and dtype; chunks are about `chunk_bytes` long.

    A matrix is in one chunk, if it has no more than `WHOLE_BYTES`; others may be cut.

    Behind them come the marks, an element for each parameter, with the dtype of the first; their
    number is that of the parameters.
    """
    unit = owners * PAGE
    chunk = max(unit, chunk_bytes // unit * unit)
    sizes = [parameter.numel() * parameter.dtype.itemsize for parameter in parameters]
    sizes.append(len(parameters) * parameters[0].dtype.itemsize)
    whole = [by_rows(one) and one.nbytes <= WHOLE_BYTES for one in parameters] + [False]
    spots = [Spot(0, 0)] * len(sizes)
    chunks: list[Chunk] = []
    place = 0
    by_dtype = _by_dtype(parameters)
    for dtype, numbers in by_dtype.items():
        start = place
        for number in numbers:
            if whole[number] and start < place and place + sizes[number] > start + chunk:
                start = place = _close(chunks, start, place, dtype, unit)
            spots[number] = Spot(place, sizes[number])
            place = _up(place + sizes[number], _ALIGNED)
            if whole[number] and place - start >= chunk:
                start = place = _close(chunks, start, place, dtype, unit)
            while place - start > chunk:
                start = _close(chunks, start, start + chunk, dtype, unit)
        if start < place:
            place = _close(chunks, start, place, dtype, unit)
    dtypes = [*(parameter.dtype for parameter in parameters), parameters[0].dtype]
    order = [number for numbers in by_dtype.values() for number in numbers]
    return Layout(spots, dtypes, order, chunks, owners)


def _close(chunks: list[Chunk], start: int, end: int, dtype: torch.dtype, unit: int) -> int:
    """Add a chunk; returns where it ends, once it is made whole slices."""
    chunks.append(Chunk(start, start + _up(end - start, unit), dtype))
    return chunks[-1].end


def _up(place: int, unit: int) -> int:
    return -(-place // unit) * unit


def _by_dtype(parameters: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    order: dict[torch.dtype, list[int]] = {}
    for number in reversed(range(len(parameters))):
        order.setdefault(parameters[number].dtype, []).append(number)
    last = order.pop(parameters[0].dtype)
    return {**order, parameters[0].dtype: [*last, len(parameters)]}
