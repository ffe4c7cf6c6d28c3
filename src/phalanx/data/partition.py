"""Splitting a data set by fractions: every rank computes the same split, and takes one part."""

import math
from collections.abc import Sequence, Sized
from typing import Generic, TypeVar

import torch
from torch.utils.data import Dataset, Subset

from phalanx.errors import UsageError

T_co = TypeVar("T_co", covariant=True)

# Tolerance for rounding in the sum of fractions: the sum of ten times 0.1 is not exactly 1.
_ROUNDING = 1e-9


class Partition(Subset[T_co]):
    """A view of some samples of a data set: sample `i` is sample `indices[i]` of the data set.

    Nothing is copied. Like every `torch.utils.data.Subset` it supports batched fetching by a list
    of indices if the data set does.

    Args:
        data: A data set with a length.
        indices: The samples of the view in order, each in `[0, len(data))`.

    Raises:
        UsageError: The data set has no length, or an index is out of range.

    Example:
        >>> Partition(range(10), [4, 5, 6])[0]
        4
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
    """A random split of a data set into parts of given fractions.

    No sample is in two parts, and no sample is lost if the fractions sum to 1. The size of a part
    is its fraction of the data, rounded down or up by the largest remainder method; if remainders
    are equal, the earlier part comes first. The shuffle uses a separate random generator. It
    depends only on `seed` and the number of samples, and does not affect PyTorch's global
    generator.

    Args:
        data: A data set with a length.
        sizes: The fraction of the data for each part. Each is above 0, and their sum is at most 1.
        seed: The seed of the shuffle. Ranks that split the same data must give the same seed.

    Raises:
        UsageError: There is no fraction, a fraction is not above 0, the sum is above 1, there are
            more parts than samples, or a part would be empty.

    Example:
        >>> train, held_out = map(DataPartitioner(data, [0.8, 0.2], seed=1).use, range(2))
    """

    def __init__(
        self, data: Dataset[T_co], sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234
    ) -> None:
        self.data = data
        counts = _counts(length(data), list(sizes))
        generator = torch.Generator().manual_seed(seed)
        order: list[int] = torch.randperm(length(data), generator=generator, device="cpu").tolist()
        ends = [sum(counts[: part + 1]) for part in range(len(counts))]
        self._parts = [order[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def __len__(self) -> int:
        return len(self._parts)

    def use(self, rank: int) -> Partition[T_co]:
        """Return part `rank`, a number from 0 to `len(self) - 1`.

        Raises:
            UsageError: `rank` is out of range.

        Example:
            >>> DataPartitioner(range(10), [0.8, 0.2]).use(1)
            Partition(2 of 10 samples)
        """
        if not 0 <= rank < len(self):
            raise UsageError(
                f"DataPartitioner.use: rank {rank} given, expected 0 to {len(self) - 1}: "
                f"the data was split into {len(self)} parts"
            )
        return Partition(self.data, self._parts[rank])


def length(data: object) -> int:
    """Return the number of samples in a data set.

    Raises:
        UsageError: The data set has no length.
    """
    if not isinstance(data, Sized):
        raise UsageError(
            f"{type(data).__name__} given, expected a data set with a length: "
            "an iterable data set cannot be split by indices"
        )
    return len(data)


def _counts(samples: int, sizes: list[float]) -> list[int]:
    """Return the number of samples in each part."""
    _check_sizes(samples, sizes)
    quotas = [size * samples for size in sizes]
    counts = [math.floor(quota) for quota in quotas]
    # The remaining samples go to the parts with the largest remainders.
    by_remainder = sorted(range(len(sizes)), key=lambda part: counts[part] - quotas[part])
    remaining = round(samples * math.fsum(sizes)) - sum(counts)
    for part in by_remainder[:remaining]:
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
            f"DataPartitioner: {len(sizes)} partitions of {samples} samples requested, expected "
            "at most one partition per sample: start fewer ranks, or give more data"
        )
