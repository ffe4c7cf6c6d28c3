"""The layout of a model's parameters in memory, and the slices that each rank owns.

Parameters of one dtype lie one after another, in the reverse of the module's order, which is about
the order in which a backward pass computes their gradients. They are cut into chunks, each of which
is reduced at once. Each chunk is cut into equal slices, one for each owner. Slices are whole pages,
so that no page has two owners.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.parallel.shared_data_parallel.deferred_linear import by_rows

__all__ = ["PAGE", "Chunk", "Layout", "Piece", "Spot", "lay_out"]

PAGE = 4096
# The alignment of parameters in bytes: vector instructions then group elements as in a new tensor.
_ALIGNED = 64
# The maximum size of a matrix that is not cut, so that a product can be written there directly.
WHOLE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Spot:
    """The position of a parameter, in bytes from the beginning of the memory."""

    start: int
    bytes: int

    @property
    def end(self) -> int:
        """The offset of the byte after the last one."""
        return self.start + self.bytes


@dataclass(frozen=True)
class Piece:
    """A run of a parameter's elements that one rank owns: bytes `start` to `end` of the memory."""

    parameter: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """A unit of reduction: bytes `start` to `end` of the memory, of one dtype."""

    start: int
    end: int
    dtype: torch.dtype


class Layout:
    """The layout of a model's parameters in memory.

    Args:
        spots: The position of each parameter, by number, and then that of the marks, which have an
            element for each parameter.
        dtypes: The dtype of each parameter, and that of the marks.
        order: The numbers of the parameters in the order of memory, and then that of the marks.
        chunks: The chunks, which cover the memory one after another.
        owners: The number of ranks among which each chunk is divided.
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
        """The size of the memory."""
        return self.chunks[-1].end

    def slices(self, owner: int) -> Iterator[Chunk]:
        """Yield an owner's slice of each chunk."""
        for chunk in self.chunks:
            size = (chunk.end - chunk.start) // self.owners
            start = chunk.start + owner * size
            yield Chunk(start, start + size, chunk.dtype)

    def pieces(self, owner: int) -> list[Piece]:
        """Return an owner's pieces; a piece never crosses the end of a parameter or a slice."""
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
    """Lay out parameters of given shapes and dtypes; chunks are about `chunk_bytes` long.

    A matrix of at most `WHOLE_BYTES` is in one chunk; other parameters may be cut. The marks follow
    the parameters: an element for each parameter, of the first parameter's dtype. The number of the
    marks in the layout is the number of parameters.
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
    """Add a chunk, rounded up to whole slices; return its end."""
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
