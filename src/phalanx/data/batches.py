"""Split every global batch over the ranks: a step sees the same samples at any world size."""

import zlib
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.data.partition import length
from phalanx.data.ranks import check_rank, place, share
from phalanx.data.resuming import Resumable
from phalanx.errors import UsageError

__all__ = ["GlobalBatchSampler", "per_rank_batch_size"]

# Samples at the head of an epoch's order that a state remembers the checksum of.
_HEAD = 1000


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
    check_rank(world_size, rank)
    if global_batch < world_size:
        raise UsageError(
            f"global batch {global_batch} given for world size {world_size}, expected at least "
            "one sample per rank: give a larger global batch, or start fewer ranks"
        )
    start, stop = share(global_batch, world_size, rank)
    return stop - start


class GlobalBatchSampler(Resumable[list[int]]):
    """Yield this rank's share of each global batch, as a list of indices into the data set.

    In an epoch the samples are shuffled once, the same way on every rank and at every world size;
    global batch `k` is the next `global_batch` of them, and each rank takes a slice of it as long
    as `per_rank_batch_size` says. The last global batch may be smaller. Every rank makes the same
    number of steps, so that collectives inside the loop fit together: a rank for which the last
    batch has no sample gets the batch's first one again, with weight 0.

    Pass it to a `DataLoader` as `batch_sampler`, or, for data that can fetch a list of indices at
    once (`TensorDataset`, `Partition`), as `sampler` with `batch_size=None`, which is faster.

    It resumes at a sample: call `advance()` after each step, save `state_dict()`, and load it into
    a sampler of the same data and seed. World size, global batch and `drop_last` may be others
    then: what is left of the epoch's order is cut into batches anew. Steps, in `len()` and
    `weight()`, count from where the iteration begins.

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
        super().__init__()
        self.samples = length(data)
        self.global_batch = global_batch
        self.world_size, self.rank = place(world_size, rank)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._cached: tuple[tuple[int, int, bool], Tensor] | None = None
        per_rank_batch_size(global_batch, self.world_size, self.rank)
        if len(self) == 0:
            raise UsageError(
                f"GlobalBatchSampler: {self.samples} samples given, expected at least "
                f"{global_batch if drop_last else 1}: no step could be made"
            )

    def weight(self, step: int) -> float:
        """Return this rank's share of global batch `step` of the iteration, from 0 to 1.

        The weights of all ranks sum to 1. A mean over this rank's samples times its weight, summed
        over the ranks, is the mean over the global batch: pass it to `average_gradients`.

        Raises:
            UsageError: There is no such step.
        """
        steps = self._left(self._start)
        if not 0 <= step < steps:
            raise UsageError(f"weight: step {step} given, expected 0 to {steps - 1}")
        size = self._batch_size(step)
        start, stop = share(size, self.world_size, self.rank)
        return (stop - start) / size

    def __len__(self) -> int:
        """Return the steps of the current iteration; once it has ended, those of the next.

        The same on every rank. An iteration has ended when `advance` has come to the epoch's end.
        """
        return self._steps()

    def __iter__(self) -> Iterator[list[int]]:
        return self._drawing(self._batches(self._begin(), self._order()))

    def _batches(self, start: int, order: Tensor) -> Iterator[list[int]]:
        for step in range(self._left(start)):
            batch = order[start + step * self.global_batch :][: self.global_batch]
            first, last = share(len(batch), self.world_size, self.rank)
            yield batch[first:last].tolist() or batch[:1].tolist()

    def _order(self) -> Tensor:
        """Return the samples of the epoch in their order, int64 [samples]."""
        key = (self.epoch, self.seed, self.shuffle)
        if self._cached is None or self._cached[0] != key:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            shuffled = torch.randperm(self.samples, generator=generator)
            self._cached = key, shuffled if self.shuffle else torch.arange(self.samples)
        return self._cached[1]

    def _batch_size(self, step: int) -> int:
        return min(self.global_batch, self.samples - self._start - step * self.global_batch)

    def _identity(self) -> dict[str, Any]:
        # PyTorch doesn't promise that another version of it shuffles in the same way.
        head = zlib.crc32(self._order()[:_HEAD].numpy().tobytes())
        described = {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle}
        return {"sampler": "GlobalBatchSampler", **described, "order": head}

    def _size(self) -> int:
        return self.samples

    def _stride(self) -> int:
        return self.global_batch

    def _left(self, position: int) -> int:
        whole, rest = divmod(self.samples - position, self.global_batch)
        return whole + (rest > 0 and not self.drop_last)
