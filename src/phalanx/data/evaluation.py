"""Evaluate exactly: every sample counts once, on some rank, and metrics are the whole set's."""

import math
import zlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeAlias, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.data.partition import length
from phalanx.data.ranks import place, place_in, sum_over_ranks
from phalanx.data.resuming import Resumable
from phalanx.errors import UsageError

__all__ = ["EvaluationSampler", "mean_over_ranks"]

Number: TypeAlias = float | int | Tensor


class EvaluationSampler(Resumable[int]):
    """Yield this rank's samples, each of the data set on exactly one rank, in the set's order.

    PyTorch's `DistributedSampler` repeats samples until all ranks have as many, or drops some: the
    accuracy is then that of another set. Here rank `r` has samples `r`, `r + world size`, ...;
    some ranks may have one more than others, and with fewer samples than ranks some have none. So
    ranks may differ in their number of batches: leave collectives out of the loop and combine the
    results with `mean_over_ranks` after it, or run the loop through `until_all_end`.

    Give it to a `DataLoader` as `sampler`, with any `batch_size`. It resumes as
    `GlobalBatchSampler` does, at any world size, once `advance(samples)` is told how many samples
    of its own each rank is done with. Save rank 0's state, at a moment when all ranks have made
    as many steps.

    Args:
        data: Anything with a length: the data set.
        world_size: Number of ranks; the default group's, or 1 where there is no group.
        rank: This rank; the default group's, or 0. Give both of them or none.

    Raises:
        UsageError: Empty data, or a rank outside the world.
    """

    def __init__(
        self,
        data: Dataset[Any] | Sized,
        *,
        world_size: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        self.samples = length(data)
        self.world_size, self.rank = place(world_size, rank)
        if self.samples == 0:
            raise UsageError("EvaluationSampler: 0 samples given, expected at least 1")

    def __len__(self) -> int:
        """Return this rank's samples in the current iteration; once it has ended, in the next."""
        return self._steps()

    def __iter__(self) -> Iterator[int]:
        own = range(self._begin() + self.rank, self.samples, self.world_size)
        return self._drawing(iter(own))

    def _identity(self) -> dict[str, Any]:
        return {"sampler": "EvaluationSampler", "samples": self.samples}

    def _size(self) -> int:
        return self.samples

    def _stride(self) -> int:
        # All ranks side by side: what they have seen is a beginning of the set.
        return self.world_size

    def _left(self, position: int) -> int:
        return len(range(position + self.rank, self.samples, self.world_size))


@overload
def mean_over_ranks(
    total: Mapping[str, Number],
    count: Number | Mapping[str, Number],
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]: ...


@overload
def mean_over_ranks(
    total: Number, count: Number, group: dist.ProcessGroup | None = None
) -> float: ...


def mean_over_ranks(
    total: Number | Mapping[str, Number],
    count: Number | Mapping[str, Number],
    group: dist.ProcessGroup | None = None,
) -> float | dict[str, float]:
    """Return sums over all ranks divided by counts over all ranks; blocks until it is known.

    That is what one process gets from the whole set, whatever ranks had how many samples; a mean of
    the ranks' means isn't. Sums are made in float64, by one all-reduce. Totals that are whole
    numbers (correct answers) give the very result of one process; others may differ from it
    by the rounding of a float64 sum, whose order differs. All ranks get the same bits.

    All ranks of the group must call it, with the same names. Without a process group this process
    is the only one.

    Args:
        total: The sum of a metric over this rank's samples, a number or a tensor of one element; or
            several by name.
        count: How many samples (or tokens, or weights) `total` sums over; one for all metrics, or
            one by name for each. A rank that had none gives 0, and its total doesn't count then,
            even if NaN.
        group: The group to combine; the default group if None.

    Returns:
        The mean, or for several metrics the means by name, in the order of `total`.

    Raises:
        UsageError: No number, a count that is negative or not finite, other names in `count` than
            in `total`, no rank in the group, other names on another rank, or a count
            that is 0 on all ranks together.
        torch.distributed.DistBackendError: The backend failed: a rank died or didn't come.

    Example:
        >>> accuracy = mean_over_ranks(correct, seen)
        >>> means = mean_over_ranks({"loss": loss_sum, "accuracy": correct}, seen)
    """
    totals = dict(total) if isinstance(total, Mapping) else {"total": total}
    counts = dict(count) if isinstance(count, Mapping) else dict.fromkeys(totals, count)
    if not totals or totals.keys() != counts.keys():
        raise UsageError(
            f"mean_over_ranks: totals {sorted(totals)} and counts {sorted(counts)} given, expected "
            "a count for each total, and at least one"
        )
    names = sorted(totals)
    shares = [_share(name, totals[name], counts[name]) for name in names]
    means = dict(zip(names, _means(names, shares, group), strict=True))
    return {name: means[name] for name in totals} if isinstance(total, Mapping) else means["total"]


def _share(name: str, total: Number, count: Number) -> tuple[float, float]:
    summed, counted = _number(name, total), _number(name, count)
    if not 0 <= counted < math.inf:
        raise UsageError(
            f"mean_over_ranks: count {counted} given for {name!r}, expected a number of samples, "
            "at least 0"
        )
    return (summed, counted) if counted else (0.0, 0.0)


def _number(name: str, value: Number) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.item())
    if isinstance(value, Tensor) or not hasattr(value, "__float__"):
        what = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise UsageError(
            f"mean_over_ranks: {what} given for {name!r}, expected a number, or a tensor "
            "of one element: sum it over the rank's samples first"
        )
    return float(value)


def _means(
    names: list[str], shares: list[tuple[float, float]], group: dist.ProcessGroup | None
) -> list[float]:
    world_size, _ = place_in(group, "mean_over_ranks")
    # The ranks' names must be the same: their checksum is summed along.
    mark = zlib.crc32("\0".join(names).encode())
    flat = [number for pair in shares for number in pair]
    sums = sum_over_ranks([mark, *flat], torch.float64, group)
    if sums[0] != world_size * mark:
        raise UsageError(
            f"mean_over_ranks: {names} given on this rank, other names on another: "
            "give the same on all"
        )
    for name, counted in zip(names, sums[2::2], strict=True):
        if counted == 0:
            raise UsageError(
                f"mean_over_ranks: count 0 given for {name!r} on all ranks: nothing was counted"
            )
    return [summed / counted for summed, counted in zip(sums[1::2], sums[2::2], strict=True)]
