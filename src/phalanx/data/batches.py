"""Split every global batch over the ranks: a step sees the same samples at any world size."""

import math
from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler

from phalanx.data.partition import length
from phalanx.errors import UsageError

__all__ = ["GlobalBatchSampler", "per_rank_batch_size"]


def per_rank_batch_size(global_batch: int, world_size: int, rank: int) -> int:
    """Return how many samples of a global batch a rank takes.

    The sizes of all ranks sum to `global_batch` exactly and differ by at most 1: what doesn't
    divide goes to the first ranks, one sample each.

    Args:
        global_batch: Samples in a step of all ranks together, at least `world_size`.
        world_size: Number of ranks.
        rank: This rank, in `[0, world_size)`.

    Raises:
        UsageError: A rank outside the world, or fewer samples than ranks.
    """
    _check_rank(world_size, rank)
    if global_batch < world_size:
        raise UsageError(
            f"global batch {global_batch} given for world size {world_size}, expected at least "
            "one sample per rank: give a larger global batch, or start fewer ranks"
        )
    start, stop = _share(global_batch, world_size, rank)
    return stop - start


class GlobalBatchSampler(Sampler[list[int]]):
    """Yield this rank's share of each global batch, as a list of indices into the data set.

    In an epoch the samples are shuffled once, the same way on every rank and at every world size;
    global batch `k` is the next `global_batch` of them, and each rank takes a slice of it as long
    as `per_rank_batch_size` says. The last global batch may be smaller. Every rank makes the same
    number of steps, so that collectives inside the loop fit together: a rank for which the last
    batch has no sample gets the batch's first one again, with weight 0.

    Pass it to a `DataLoader` as `batch_sampler`, or, for data that can fetch a list of indices at
    once (`TensorDataset`, `Partition`), as `sampler` with `batch_size=None`, which is faster.

    Args:
        data: Anything with a length: the data set.
        global_batch: Samples in a step of all ranks together, at least one per rank.
        world_size: Number of ranks; the default group's, or 1 where there is no group.
        rank: This rank; the default group's, or 0. Give both of them or none.
        shuffle: Draw a new order for every epoch; otherwise the data set's own order.
        seed: Seed of the shuffle, the same on every rank. The order of an epoch comes from
            `seed + epoch`, as in PyTorch's `DistributedSampler`.
        drop_last: Leave out a last global batch that is smaller.

    Raises:
        UsageError: Empty data, a rank outside the world, fewer samples in a batch than ranks, or
            nothing left once the last batch is dropped.
    """

    def __init__(
        self,
        data: Dataset[Any] | Sized,
        global_batch: int,
        *,
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.samples = length(data)
        self.global_batch = global_batch
        self.world_size, self.rank = _place(world_size, rank)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.drop_last = drop_last
        per_rank_batch_size(global_batch, self.world_size, self.rank)
        if len(self) == 0:
            raise UsageError(
                f"GlobalBatchSampler: {self.samples} samples given, expected at least "
                f"{global_batch if drop_last else 1}: no step could be made"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and with it the order of the samples, that the next iteration yields.

        Call it on every rank before each epoch; otherwise every epoch has the same order.
        """
        self.epoch = epoch

    def weight(self, step: int) -> float:
        """Return this rank's share of global batch `step` of an epoch, from 0 to 1.

        The weights of all ranks sum to 1. A mean over this rank's samples times its weight, summed
        over the ranks, is the mean over the global batch: pass it to `average_gradients`.

        Raises:
            UsageError: An epoch has no such step.
        """
        if not 0 <= step < len(self):
            raise UsageError(f"weight: step {step} given, expected 0 to {len(self) - 1}")
        size = self._batch_size(step)
        start, stop = _share(size, self.world_size, self.rank)
        return (stop - start) / size

    def __len__(self) -> int:
        """Return the steps in an epoch, the same on every rank."""
        if self.drop_last:
            return self.samples // self.global_batch
        return math.ceil(self.samples / self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step in range(len(self)):
            first = step * self.global_batch
            batch = order[first : first + self._batch_size(step)]
            start, stop = _share(len(batch), self.world_size, self.rank)
            yield batch[start:stop] or batch[:1]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        return order

    def _batch_size(self, step: int) -> int:
        return min(self.global_batch, self.samples - step * self.global_batch)


def _share(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return where a rank's slice of `size` samples starts and stops."""
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def _place(world_size: int | None, rank: int | None) -> tuple[int, int]:
    if (world_size is None) != (rank is None):
        raise UsageError(
            f"world size {world_size} and rank {rank} given, expected both or none of them"
        )
    if world_size is not None and rank is not None:
        return world_size, rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def _check_rank(world_size: int, rank: int) -> None:
    if world_size < 1:
        raise UsageError(f"world size {world_size} given, expected at least 1")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} given, expected 0 to {world_size - 1}")
