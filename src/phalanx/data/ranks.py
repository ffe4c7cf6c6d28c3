"""Values over all ranks: means of metrics, and the sums that they are made of."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias, overload

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import UsageError

Number: TypeAlias = float | int | Tensor


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
    """Return the total over all ranks divided by the count over all ranks. Collective; blocks.

    The result is the mean that one process computes over the whole set, even if the number of
    samples differs between ranks. A mean of the ranks' means is different. One all-reduce sums in
    float64. Integer totals (correct answers) give exactly the result of one process. Other totals
    may differ from it by the rounding of a float64 sum, whose order differs. The result is bitwise
    equal on all ranks.

    All ranks of the group must call it, with the same names. Without a process group the result is
    that of this process.

    Args:
        total: The sum of a metric over this rank's samples, a number or a tensor of one element; or
            a mapping of such sums by name.
        count: The number of samples (or tokens, or weights) in `total`: one for all metrics, or a
            mapping with one for each name. A rank without samples gives 0; its total is then
            ignored, even if NaN.
        group: The group to combine; the default group if None.

    Returns:
        The mean, or for several metrics the means by name, in the order of `total`.

    Raises:
        UsageError: A value is not a number, a count is negative or not finite, the names of `count`
            and `total` differ, this rank is not in the group, the names differ between ranks, or a
            count is 0 on all ranks together.
        torch.distributed.DistBackendError: A rank died or did not join the collective.

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
    contributions = [_contribution(name, totals[name], counts[name]) for name in names]
    means = dict(zip(names, _means(names, contributions, group), strict=True))
    return {name: means[name] for name in totals} if isinstance(total, Mapping) else means["total"]


def _contribution(name: str, total: Number, count: Number) -> tuple[float, float]:
    total_value, count_value = _number(name, total), _number(name, count)
    if not 0 <= count_value < math.inf:
        raise UsageError(
            f"mean_over_ranks: count {count_value} given for {name!r}, expected a number of "
            "samples, at least 0"
        )
    return (total_value, count_value) if count_value else (0.0, 0.0)


def _number(name: str, value: Number) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.item())
    if isinstance(value, Tensor) or not hasattr(value, "__float__"):
        description = (
            f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        )
        raise UsageError(
            f"mean_over_ranks: {description} given for {name!r}, expected a number, or a tensor "
            "of one element: sum it over the rank's samples first"
        )
    return float(value)


def _means(
    names: list[str], contributions: list[tuple[float, float]], group: dist.ProcessGroup | None
) -> list[float]:
    world_size, _ = world_size_and_rank(group, "mean_over_ranks")
    # The all-reduce also sums a checksum of the names, to check that they are equal on all ranks.
    checksum = zlib.crc32("\0".join(names).encode())
    flat = [number for pair in contributions for number in pair]
    sums = sum_over_ranks([checksum, *flat], torch.float64, group)
    if sums[0] != world_size * checksum:
        raise UsageError(
            f"mean_over_ranks: {names} given on this rank, different names on another: "
            "give the same names on all ranks"
        )
    for name, count_value in zip(names, sums[2::2], strict=True):
        if count_value == 0:
            raise UsageError(
                f"mean_over_ranks: count 0 given for {name!r} on all ranks: nothing was counted"
            )
    return [
        total_value / count_value
        for total_value, count_value in zip(sums[1::2], sums[2::2], strict=True)
    ]


def world_size_and_rank(group: dist.ProcessGroup | None, caller: str) -> tuple[int, int]:
    """Return the world size and rank in a group, or (1, 0) without any process group.

    Raises:
        UsageError: This rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1, 0
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise UsageError(f"{caller}: this rank is not a member of the group given")
    return world_size, rank


def sum_over_ranks(
    values: Sequence[int | float], dtype: torch.dtype, group: dist.ProcessGroup | None
) -> list[int | float]:
    """Return the element-wise sums over the ranks of a group, by one all-reduce. Blocks."""
    if not (dist.is_available() and dist.is_initialized()):
        return list(values)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    tensor: Tensor = torch.tensor(values, dtype=dtype, device=device)
    dist.all_reduce(tensor, group=group)
    sums: list[int | float] = tensor.tolist()
    return sums
