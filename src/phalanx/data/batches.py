"""Splitting global batches over the ranks: a step has the same samples at any world size."""

import zlib
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.data.partition import length
from phalanx.data.ranks import check_rank, rank_slice, resolve_rank
from phalanx.data.resumable import Resumable
from phalanx.errors import UsageError

__all__ = ["GlobalBatchSampler", "per_rank_batch_size"]

# Number of samples at the start of an epoch's order whose checksum is part of a state.
_CHECKED_SAMPLES = 1000


def per_rank_batch_size(global_batch: int, world_size: int, rank: int) -> int:
    """Return the number of samples of a global batch on a rank.

    The sizes of all ranks sum to `global_batch` exactly and differ by at most 1. The first ranks
    get one sample more each if `world_size` does not divide `global_batch`.

    Args:
        global_batch: Number of samples in a step on all ranks together, at least `world_size`.
        world_size: Number of ranks.
        rank: This rank, in `[0, world_size)`.

    Raises:
        UsageError: The rank is not in `[0, world_size)`, or there are fewer samples than ranks.
    """
    check_rank(world_size, rank)
    if global_batch < world_size:
        raise UsageError(
            f"global batch {global_batch} given for world size {world_size}, expected at least "
            "one sample per rank: give a larger global batch, or start fewer ranks"
        )
    start, stop = rank_slice(global_batch, world_size, rank)
    return stop - start


class GlobalBatchSampler(Resumable[list[int]]):
    """A batch sampler that yields this rank's share of each global batch as a list of indices.

    The samples of an epoch are shuffled once, in the same way on every rank and at every world
    size. Consecutive slices of `global_batch` samples form the global batches. Each rank takes a
    contiguous slice of a global batch, with the length given by `per_rank_batch_size`. The last
    global batch may be smaller. Every rank makes the same number of steps, so that collectives in
    the loop match. If the last batch has no sample for a rank, the rank gets the first sample of
    the batch with weight 0.

    Pass it to a `DataLoader` as `batch_sampler`. For data that can fetch a list of indices at once
    (`TensorDataset`, `Partition`), pass it as `sampler` with `batch_size=None`, which is faster.

    It resumes at a sample: call `advance()` after each step, save `state_dict()`, and load it into
    a sampler with the same data and seed. World size, global batch and `drop_last` may differ then:
    the rest of the epoch's order is split into new batches. `len()` and `weight()` count steps from
    the beginning of the iteration.

    Args:
        data: The data set, or any object with a length.
        global_batch: Number of samples in a step on all ranks together, at least one per rank.
        world_size: Number of ranks; by default that of the default group, or 1 without a group.
        rank: This rank; by default that in the default group, or 0 without a group. Give both
            `world_size` and `rank`, or neither.
        shuffle: True to draw a new order for every epoch; False to use the data set's order.
        seed: The seed of the shuffle, the same on every rank. The order of an epoch comes from
            `seed + epoch`, as in PyTorch's `DistributedSampler`.
        drop_last: True to drop the last global batch if it is smaller.

    Raises:
        UsageError: The data set is empty, the rank is not in `[0, world_size)`, a global batch has
            fewer samples than there are ranks, or nothing is left after dropping the last batch.
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
        super().__init__()
        self.samples = length(data)
        self.global_batch = global_batch
        self.world_size, self.rank = resolve_rank(world_size, rank)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._cached_order: tuple[tuple[int, int, bool], Tensor] | None = None
        per_rank_batch_size(global_batch, self.world_size, self.rank)
        if len(self) == 0:
            raise UsageError(
                f"GlobalBatchSampler: {self.samples} samples given, expected at least "
                f"{global_batch if drop_last else 1}: no step could be made"
            )

    def weight(self, step: int) -> float:
        """Return this rank's share of global batch `step` of the iteration, from 0 to 1.

        The weights of all ranks sum to 1. A mean over this rank's samples times its weight, summed
        over the ranks, is the mean over the global batch. Pass the weight to `average_gradients`.

        Raises:
            UsageError: `step` is out of range.
        """
        steps = self._steps_left(self._start)
        if not 0 <= step < steps:
            raise UsageError(f"weight: step {step} given, expected 0 to {steps - 1}")
        size = self._batch_size(step)
        start, stop = rank_slice(size, self.world_size, self.rank)
        return (stop - start) / size

    def __len__(self) -> int:
        """Return the number of steps in the current iteration, or in the next once it has ended.

        It is the same on every rank. An iteration ends when `advance` reaches the end of the epoch.
        """
        return self._steps()

    def __iter__(self) -> Iterator[list[int]]:
        return self._count_items(self._batches(self._start_iteration(), self._order()))

    def _batches(self, start: int, order: Tensor) -> Iterator[list[int]]:
        for step in range(self._steps_left(start)):
            batch = order[start + step * self.global_batch :][: self.global_batch]
            first, last = rank_slice(len(batch), self.world_size, self.rank)
            yield batch[first:last].tolist() or batch[:1].tolist()

    def _order(self) -> Tensor:
        """Return the indices of the samples in the order of the epoch, int64 [samples]."""
        key = (self.epoch, self.seed, self.shuffle)
        if self._cached_order is None or self._cached_order[0] != key:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            shuffled = torch.randperm(self.samples, generator=generator)
            self._cached_order = key, shuffled if self.shuffle else torch.arange(self.samples)
        return self._cached_order[1]

    def _batch_size(self, step: int) -> int:
        return min(self.global_batch, self.samples - self._start - step * self.global_batch)

    def _identity(self) -> dict[str, Any]:
        # PyTorch does not guarantee that its versions shuffle in the same way.
        checksum = zlib.crc32(self._order()[:_CHECKED_SAMPLES].numpy().tobytes())
        settings = {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle}
        return {"sampler": "GlobalBatchSampler", **settings, "order": checksum}

    def _end_position(self) -> int:
        return self.samples

    def _stride(self) -> int:
        return self.global_batch

    def _steps_left(self, position: int) -> int:
        whole, rest = divmod(self.samples - position, self.global_batch)
        return whole + (rest > 0 and not self.drop_last)
