"""Shared functions: the rank and world size, slices of samples, and sums over ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import UsageError

__all__ = ["check_rank", "rank_slice", "resolve_rank", "sum_over_ranks", "world_size_and_rank"]


def resolve_rank(world_size: int | None, rank: int | None) -> tuple[int, int]:
    """Return the given world size and rank, or those of the default group, or (1, 0) without one.

    Raises:
        UsageError: Only one of them is given, or the rank is not in `[0, world_size)`.
    """
    if (world_size is None) != (rank is None):
        raise UsageError(
            f"world size {world_size} and rank {rank} given, expected both or none of them"
        )
    if world_size is not None and rank is not None:
        check_rank(world_size, rank)
        return world_size, rank
    return world_size_and_rank(None, "")


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


def check_rank(world_size: int, rank: int) -> None:
    """Raise UsageError if the rank is not in `[0, world_size)` or there are no ranks."""
    if world_size < 1:
        raise UsageError(f"world size {world_size} given, expected at least 1")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} given, expected 0 to {world_size - 1}")


def rank_slice(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the start and stop of a rank's slice of `size` samples."""
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


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
