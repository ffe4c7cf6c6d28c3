"""Split a data set by fractions: every rank computes the same split, and takes one part of it."""

import math
from collections.abc import Sequence, Sized
from typing import Generic, TypeVar

import torch
from torch.utils.data import Dataset, Subset

from phalanx.errors import UsageError

__all__ = ["DataPartitioner", "Partition", "length"]

T_co = TypeVar("T_co", covariant=True)

# Fractions are sums of floats: ten times 0.1 is not 1.
_ROUNDING = 1e-9


class Partition(Subset[T_co]):
    """A view of some samples of a data set: sample `i` is sample `indices[i]` of the data set.

    Nothing is copied. Like every `torch.utils.data.Subset` it takes a list of indices too, if the
    data set does, which fetches a whole batch at once.

    Args:
        data: A data set with a length.
        indices: The samples to show, each in `[0, len(data))`, in this order.

    Raises:
        UsageError: The data set has no length, or an index lies outside it.
    """

    def __init__(self, data: Dataset[T_co], indices: Sequence[int]) -> None:
        size = length(data)
        for index in indices:
            if not 0 <= index < size:
                raise UsageError(f"Partition: index {index} given, expected 0 to {size - 1}")
        super().__init__(data, indices)

    def __repr__(self) -> str:
        return f"Partition({len(self)} of {length(self.dataset)} samples)"


class DataPartitioner(Generic[T_co]):
    """Split a data set at random into parts of given fractions.

    No sample is in two parts, and fractions that sum to 1 lose none: each part's size is its
    fraction of the data rounded down or up (largest remainder method, the earlier part first
    where remainders are equal). The shuffle has a random generator of its own: it depends on
    `seed` and the number of samples only, and leaves PyTorch's global generator alone.

    Args:
        data: A data set with a length.
        sizes: A fraction of the data for each part, each above 0, together at most 1.
        seed: Seed of the shuffle: ranks that split the same data must give the same one.

    Raises:
        UsageError: No fraction, a fraction that isn't above 0, a sum above 1, more parts than
            samples, or a part that would be empty.

    Example:
        >>> train, held_out = map(DataPartitioner(data, [0.8, 0.2], seed=1).use, range(2))
    """

    def __init__(
        self, data: Dataset[T_co], sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234
    ) -> None:
        self.data = data
        counts = _counts(length(data), list(sizes))
        generator = torch.Generator().manual_seed(seed)
        order: list[int] = torch.randperm(length(data), generator=generator).tolist()
        ends = [sum(counts[: part + 1]) for part in range(len(counts))]
        self._parts = [order[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def __len__(self) -> int:
        return len(self._parts)

    def use(self, rank: int) -> Partition[T_co]:
        """Return part `rank`, a number from 0 to `len(self) - 1`.

        Raises:
            UsageError: There is no such part.
        """
        if not 0 <= rank < len(self):
            raise UsageError(
                f"DataPartitioner.use: rank {rank} given, expected 0 to {len(self) - 1}: "
                f"the data was split into {len(self)} parts"
            )
        return Partition(self.data, self._parts[rank])


def length(data: object) -> int:
    """Return the number of samples; UsageError if the data set can't tell."""
    if not isinstance(data, Sized):
        raise UsageError(
            f"{type(data).__name__} given, expected a data set with a length: "
            "an iterable data set can't be split by indices"
        )
    return len(data)


def _counts(samples: int, sizes: list[float]) -> list[int]:
    """Return how many of the samples each part gets."""
    _check_sizes(samples, sizes)
    quotas = [size * samples for size in sizes]
    counts = [math.floor(quota) for quota in quotas]
    # What rounding down left over goes to the parts that lost most by it.
    by_loss = sorted(range(len(sizes)), key=lambda part: counts[part] - quotas[part])
    left_over = round(samples * math.fsum(sizes)) - sum(counts)
    for part in by_loss[:left_over]:
        counts[part] += 1
    if 0 in counts:
        part = counts.index(0)
        raise UsageError(
            f"DataPartitioner: part {part} would be empty: {sizes[part]:g} of {samples} samples "
            "given; expected a larger fraction, or more samples"
        )
    return counts


def _check_sizes(samples: int, sizes: list[float]) -> None:
    if not sizes:
        raise UsageError("DataPartitioner: no sizes given, expected a fraction for each part")
    for part, size in enumerate(sizes):
        if not (math.isfinite(size) and size > 0):
            raise UsageError(
                f"DataPartitioner: fraction {size} given for part {part}, "
                "expected a number above 0 and at most 1"
            )
    if math.fsum(sizes) > 1 + _ROUNDING:
        raise UsageError(
            f"DataPartitioner: fractions that sum to {math.fsum(sizes):g} given, "
            f"expected at most 1: divide each by the sum"
        )
    if len(sizes) > samples:
        raise UsageError(
            f"DataPartitioner: {len(sizes)} partitions of {samples} samples asked for, expected "
            "at most one partition per sample: start fewer ranks, or give more data"
        )
