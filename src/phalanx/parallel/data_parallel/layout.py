"""Where each parameter lies in the memory of a model, and which rank owns what.

Parameters of one dtype lie one after another in a region, in the reverse of the module's order,
which is about that in which a backward pass makes their gradients. A region is cut into chunks,
what is reduced at once, and each chunk into equal slices, one for each owner. Slices are whole
pages, so that no page has two owners.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["PAGE", "Layout", "Piece", "Region", "Spot", "lay_out"]

PAGE = 4096
# Where a parameter begins: vector instructions then treat its elements as in a tensor of its own.
_ALIGNED = 64


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
class Region:
    """The memory of the parameters of one dtype.

    Attributes:
        dtype: Theirs.
        start: In bytes, from the beginning of the memory, as are all places.
        end: Where the last chunk ends.
        chunk: Bytes of a chunk; the last one of a region may be smaller.
        parameters: Their numbers, in the order in which they lie here.
    """

    dtype: torch.dtype
    start: int
    end: int
    chunk: int
    parameters: tuple[int, ...]

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Where each chunk begins and ends."""
        for start in range(self.start, self.end, self.chunk):
            yield start, min(start + self.chunk, self.end)


class Layout:
    """Where the parameters of a model lie.

    Args:
        spots: Of each parameter, by number, and of the marks: an element for each parameter.
        regions: One for each dtype.
        owners: Among how many ranks each chunk is divided.
    """

    def __init__(self, spots: Sequence[Spot], regions: Sequence[Region], owners: int) -> None:
        self.spots = tuple(spots)
        self.regions = tuple(regions)
        self.owners = owners

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The numbers of the parameters as they lie in memory; the marks come last."""
        return tuple(number for region in self.regions for number in region.parameters)

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return max((region.end for region in self.regions), default=0)

    def dtype(self, number: int) -> torch.dtype:
        """Of a parameter, or the marks."""
        return next(region.dtype for region in self.regions if number in region.parameters)

    @cached_property
    def chunks(self) -> tuple[tuple[int, int, torch.dtype], ...]:
        """Beginning, end and dtype of all chunks, in the order in which gradients come."""
        return tuple(
            (start, end, region.dtype) for region in self.regions for start, end in region.chunks()
        )

    def slices(self, owner: int) -> Iterator[tuple[int, int, torch.dtype]]:
        """Beginning, end and dtype of an owner's slice of each chunk."""
        for start, end, dtype in self.chunks:
            size = (end - start) // self.owners
            yield start + owner * size, start + (owner + 1) * size, dtype

    def pieces(self, owner: int) -> list[Piece]:
        """What an owner has of each parameter: no piece crosses a parameter's end or a slice's."""
        order = self.order[:-1]
        made = []
        first = 0
        for start, end, _ in self.slices(owner):
            while first < len(order) and self.spots[order[first]].end <= start:
                first += 1
            for number in order[first:]:
                spot = self.spots[number]
                if spot.start >= end:
                    break
                cut = Piece(number, max(start, spot.start), min(end, spot.end))
                if cut.start < cut.end:
                    made.append(cut)
        return made


def lay_out(parameters: Sequence[Tensor], owners: int, chunk_bytes: int) -> Layout:
    """Lay out parameters, each with its shape and dtype; chunks are about `chunk_bytes` long.

    Behind them comes one more, with their number for its own, of an element for each parameter and
    the dtype of the first.
    """
    unit = owners * PAGE
    chunk = max(unit, chunk_bytes // unit * unit)
    sizes = [parameter.numel() * parameter.dtype.itemsize for parameter in parameters]
    sizes.append(len(parameters) * parameters[0].dtype.itemsize)
    spots = [Spot(0, 0)] * len(sizes)
    regions: list[Region] = []
    start = 0
    for dtype, numbers in _by_dtype(parameters).items():
        place = start
        for number in numbers:
            spots[number] = Spot(place, sizes[number])
            place += -(-sizes[number] // _ALIGNED) * _ALIGNED
        end = start + -(-(place - start) // unit) * unit
        regions.append(Region(dtype, start, end, chunk, tuple(numbers)))
        start = end
    return Layout(spots, regions, owners)


def _by_dtype(parameters: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    order: dict[torch.dtype, list[int]] = {}
    for number in reversed(range(len(parameters))):
        order.setdefault(parameters[number].dtype, []).append(number)
    last = order.pop(parameters[0].dtype)
    return {**order, parameters[0].dtype: [*last, len(parameters)]}
