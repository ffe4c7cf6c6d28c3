"""The layout of a model's parameters in memory, and the slices that each rank owns.

Parameters of one dtype lie one after another, in the reverse of the module's order, which is about
the order in which a backward pass computes their gradients. They are split into buckets, each of
which is reduced at once. Each bucket is split into equal slices, one for each owner. Slices are
whole pages, so that no page has two owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.parallel.shared_data_parallel.deferred_linear import is_row_major_matrix

PAGE_BYTES = 4096
# The alignment of parameters in bytes: vector instructions then group elements as in a new tensor.
ALIGNMENT = 64
# The maximum size of a matrix that is not split, so that a product can be written there directly.
MAX_UNSPLIT_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ParameterSlot:
    """The position of a parameter: bytes `start` to `end` of the memory."""

    start: int
    end: int


@dataclass(frozen=True)
class ParameterFragment:
    """The part of a parameter in a region: bytes `start` to `end` of the memory."""

    parameter: int
    start: int
    end: int
    region: int


@dataclass(frozen=True)
class Bucket:
    """A unit of reduction: bytes `start` to `end` of the memory, of one dtype."""

    start: int
    end: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """The layout of a model's parameters in memory.

    Attributes:
        slots: The position of each parameter, by number, and then that of the presence flags, which
            have an element for each parameter.
        dtypes: The dtype of each parameter, and that of the flags.
        order: The numbers of the parameters in the order of memory, and then that of the flags.
        buckets: The buckets, which cover the memory one after another.
        owners: The number of ranks among which each bucket is divided.
    """

    slots: Sequence[ParameterSlot]
    dtypes: Sequence[torch.dtype]
    order: Sequence[int]
    buckets: Sequence[Bucket]
    owners: int

    @property
    def bytes(self) -> int:
        """The size of the memory."""
        return self.buckets[-1].end

    def slices(self, rank: int) -> Iterator[Bucket]:
        """Yield a rank's slice of each bucket; none if the rank is not an owner."""
        for bucket in self.buckets if rank < self.owners else ():
            size = (bucket.end - bucket.start) // self.owners
            start = bucket.start + rank * size
            yield Bucket(start, start + size, bucket.dtype)

    def fragments(self, regions: Iterable[Bucket]) -> Iterator[ParameterFragment]:
        """Yield the parts of parameters, and of the flags, in ascending regions."""
        first = 0
        for region, bounds in enumerate(regions):
            while first < len(self.order) and self.slots[self.order[first]].end <= bounds.start:
                first += 1
            for number in self.order[first:]:
                slot = self.slots[number]
                if slot.start >= bounds.end:
                    break
                start, end = max(bounds.start, slot.start), min(bounds.end, slot.end)
                if start < end:
                    yield ParameterFragment(number, start, end, region)

    def owned_fragments(self, rank: int) -> list[ParameterFragment]:
        """Return the fragments of parameters in a rank's slices."""
        flags = self.order[-1]
        fragments = self.fragments(self.slices(rank))
        return [fragment for fragment in fragments if fragment.parameter != flags]

    def elements(self, fragment: ParameterFragment) -> slice:
        """Return the indices of a fragment's elements in its parameter."""
        start = self.slots[fragment.parameter].start
        size = self.dtypes[fragment.parameter].itemsize
        return slice((fragment.start - start) // size, (fragment.end - start) // size)


def make_layout(parameters: Sequence[Tensor], owners: int, bucket_bytes: int) -> Layout:
    """Lay out parameters of given shapes and dtypes; buckets are about `bucket_bytes` long.

    A matrix of at most `MAX_UNSPLIT_BYTES` is in one bucket; other parameters may be split. The
    flags follow the parameters: an element for each parameter, of the first parameter's dtype. The
    number of the flags in the layout is the number of parameters.
    """
    unit = owners * PAGE_BYTES
    bucket = max(unit, bucket_bytes // unit * unit)
    sizes = [parameter.numel() * parameter.dtype.itemsize for parameter in parameters]
    sizes.append(len(parameters) * parameters[0].dtype.itemsize)
    unsplit = [
        is_row_major_matrix(parameter) and parameter.nbytes <= MAX_UNSPLIT_BYTES
        for parameter in parameters
    ] + [False]
    slots = [ParameterSlot(0, 0)] * len(sizes)
    buckets: list[Bucket] = []
    offset = 0
    by_dtype = _by_dtype(parameters)
    for dtype, numbers in by_dtype.items():
        start = offset
        for number in numbers:
            if unsplit[number] and start < offset and offset + sizes[number] > start + bucket:
                start = offset = _append_bucket(buckets, start, offset, dtype, unit)
            slots[number] = ParameterSlot(offset, offset + sizes[number])
            offset = round_up(offset + sizes[number], ALIGNMENT)
            if unsplit[number] and offset - start >= bucket:
                start = offset = _append_bucket(buckets, start, offset, dtype, unit)
            while offset - start > bucket:
                start = _append_bucket(buckets, start, start + bucket, dtype, unit)
        if start < offset:
            offset = _append_bucket(buckets, start, offset, dtype, unit)
    dtypes = [*(parameter.dtype for parameter in parameters), parameters[0].dtype]
    order = [number for numbers in by_dtype.values() for number in numbers]
    return Layout(slots, dtypes, order, buckets, owners)


def _append_bucket(
    buckets: list[Bucket], start: int, end: int, dtype: torch.dtype, unit: int
) -> int:
    """Add a bucket, rounded up to whole slices; return its end."""
    buckets.append(Bucket(start, start + round_up(end - start, unit), dtype))
    return buckets[-1].end


def round_up(offset: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `offset`."""
    return -(-offset // unit) * unit


def _by_dtype(parameters: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    order: dict[torch.dtype, list[int]] = {}
    for number in reversed(range(len(parameters))):
        order.setdefault(parameters[number].dtype, []).append(number)
    numbers_of_last = order.pop(parameters[0].dtype)
    return {**order, parameters[0].dtype: [*numbers_of_last, len(parameters)]}
