"""Samplers that divide a data set among the ranks and resume in the middle of an epoch.

`GlobalBatchSampler` is for training: a step has the same samples at every world size.
`EvaluationSampler` is for evaluation: each sample counts once. `ResumableSampler` makes another
sampler resumable. `Resumable` is their common base.
"""

import itertools
import logging
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from phalanx.data.loader_seed import discard_seed_if
from phalanx.data.partition import length
from phalanx.data.ranks import world_size_and_rank
from phalanx.errors import UsageError

T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger("phalanx")

_ADVICE = {
    "sampler": "resume with the kind of sampler that the state was saved from",
    "samples": "resume with the data set that the state was saved with",
    "items": "resume with the data set that the state was saved with",
    "seed": "create the sampler with the seed of the state",
    "shuffle": "create the sampler with the shuffle of the state",
    "order": "the order of the samples differs: does this version of PyTorch shuffle differently?",
    "world_size": "resume with the same number of ranks, or use GlobalBatchSampler, which "
    "resumes with any number of ranks",
}

# Number of samples at the start of an epoch's order whose checksum is part of a state.
_CHECKED_SAMPLES = 1000


class Resumable(Sampler[T_co]):
    """A sampler with a position: the part of the epoch's order that has been trained on.

    A `DataLoader` with workers prefetches several batches, so the items that it has drawn have not
    all been trained on. The training loop must therefore call `advance` after each step. An
    iteration begins at the position.

    An epoch that is over is over: the `advance` that completes it moves the sampler to the
    beginning of the next epoch, and `at_end` is True until that begins.

    An epoch that continues leaves the random numbers as they were. Each iteration of a `DataLoader`
    draws a seed from the loader's generator. If the iteration begins in the middle of an epoch,
    that draw is undone.

    Attributes:
        epoch: The epoch of the next step, from 0.
    """

    _stride = 1
    """The distance by which a step moves the position."""

    def __init__(self) -> None:
        discard_seed_if(_has_begun)
        self.epoch = 0
        self._position = 0
        self._start = 0  # the position at which the current or next iteration begins
        self._is_iterating = False  # True if there is a current iteration
        self._at_end = False
        self._is_resumed = False  # True if a state was loaded from a run that had begun
        self._items_drawn = 0
        self._warned = False

    @property
    def at_end(self) -> bool:
        """True from the last step of an epoch until the next epoch begins.

        It tells a loop when to do what belongs to the end of an epoch, such as a step of a schedule
        or an evaluation. Do it before a checkpoint is saved: a run that resumes from the checkpoint
        of an epoch's last step begins with the next epoch. Between the last step and the next
        epoch, `epoch` is already the next one.

        Example:
            >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
            >>> for batch in loader:
            ...     train_step(batch)
            ...     sampler.advance()
            ...     if sampler.at_end:
            ...         scheduler.step()
        """
        return self._at_end

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the samples in the next iteration.

        Call it on every rank before each epoch. Without it, `advance` moves to the next epoch at
        the end of one; if neither is called, every epoch has the same order. If `epoch` is the
        current epoch, as after `load_state_dict`, the position stays. Any other epoch begins at its
        first sample.

        Example:
            >>> for epoch in range(sampler.epoch, 10):
            ...     sampler.set_epoch(epoch)
            ...     for batch in loader:
            ...         train_step(batch)
        """
        if epoch != self.epoch or self._at_end:
            self._begin_at(epoch, 0)
        else:
            self._set_epoch(epoch)  # a wrapped sampler may be in another one

    def advance(self, steps: int = 1) -> None:
        """Mark the next `steps` items of this sampler as trained on.

        An item is a batch for `GlobalBatchSampler`, and a sample for other samplers. Call it on
        every rank after `optimizer.step()`. It does not communicate. It is not needed if the run
        never resumes. With the last item of the epoch, `epoch` becomes the next one, and `at_end`
        True.

        Raises:
            UsageError: The epoch has fewer steps left, or `steps` is negative.

        Example:
            >>> for batch in loader:
            ...     train_step(batch)
            ...     sampler.advance()
        """
        ended = self._at_end
        remaining = 0 if ended else self._steps_left(self._position)
        if not 0 <= steps <= remaining:
            raise UsageError(
                f"{type(self).__name__}.advance: {steps} given, expected 0 to {remaining}, the "
                f"steps left in epoch {self.epoch - ended}: call set_epoch() before the next epoch"
            )
        if steps == 0:
            return
        if steps == remaining:
            self._end_epoch()
        else:
            self._position += steps * self._stride
        if not self._is_iterating:
            self._start = self._position

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler: numbers and strings only, suitable for JSON.

        It has the epoch and the position of the next step, and the values that determine the
        order. It is the same on all ranks that have made the same number of steps. Save rank 0's
        state, and load it on all ranks.
        """
        is_unmoved = self._position == self._start and not self._at_end
        if self._items_drawn > 1 and is_unmoved and not self._warned:
            self._warned = True
            _log.warning(
                "%s: %d items have been drawn, but advance() was not called: the state records "
                "none of them as processed",
                type(self).__name__,
                self._items_drawn,
            )
        return {"epoch": self.epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state: the next iteration yields the remaining items of its epoch.

        If the epoch has no items left, the next iteration is the whole next epoch. `for epoch in
        range(sampler.epoch, epochs)` with `sampler.set_epoch(epoch)` therefore completes the
        remaining work. Existing iterators are not affected.

        Raises:
            UsageError: The state is of a different sampler, data set, seed or order, or is not a
                valid state. The sampler stays unchanged.

        Example:
            >>> state = sampler.state_dict()
            >>> sampler = GlobalBatchSampler(data, 32, seed=1)
            >>> sampler.load_state_dict(state)
        """
        epoch, position = _epoch_and_position(state, f"{type(self).__name__}.load_state_dict")
        previous, self.epoch = self.epoch, epoch
        try:
            self._check(state, position)
        except UsageError:
            self.epoch = previous
            raise
        over = self._is_over(position)
        self._begin_at(epoch + over, 0 if over else position)
        self._is_resumed = epoch > 0 or position > 0

    def __len__(self) -> int:
        """Return the number of items in the current iteration, or in the next once it has ended.

        An iteration ends when `advance` reaches the end of the epoch.
        """
        return self._steps_left(self._position if self._at_end else self._start)

    def _start_iteration(self) -> int:
        """Start a new iteration, and return the position at which it begins."""
        self._start, self._items_drawn, self._is_iterating = self._position, 0, True
        self._at_end = False
        return self._start

    def _count_items(self, items: Iterator[T_co]) -> Iterator[T_co]:
        start = self._start
        for item in items:
            self._items_drawn += 1
            yield item
        if not self._steps_left(start) and self._position == start:
            self._end_epoch()  # there was no item to advance over

    def _end_epoch(self) -> None:
        self._set_epoch(self.epoch + 1)
        self._position, self._at_end = 0, True

    def _begin_at(self, epoch: int, position: int) -> None:
        self._set_epoch(epoch)
        self._position = self._start = position
        self._at_end = self._is_iterating = False
        self._items_drawn = 0

    def _set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _is_over(self, position: int) -> bool:
        """Return whether no rank has a step left in the epoch."""
        return self._steps_left(position) == 0

    def _check(self, state: Mapping[str, Any], position: int) -> None:
        name = f"{type(self).__name__}.load_state_dict"
        for key, expected in self._identity().items():
            if key not in state or state[key] != expected:
                actual = repr(state[key]) if key in state else "unknown"
                raise UsageError(
                    f"{name}: a state with {key} {actual} given, expected {key} {expected!r} as in "
                    f"this sampler: {_ADVICE[key]}"
                )
        if not 0 <= position <= self._end_position():
            raise UsageError(
                f"{name}: position {position} given, expected 0 to {self._end_position()}: the "
                "state is damaged"
            )

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the values that determine the order of epoch `self.epoch`."""

    @abstractmethod
    def _end_position(self) -> int:
        """Return the position at the end of an epoch."""

    @abstractmethod
    def _steps_left(self, position: int) -> int:
        """Return the number of steps of this rank from a position to the end of the epoch."""


def _has_begun(sampler: object, loader: DataLoader[Any]) -> bool:
    """Return whether an uninterrupted run has begun the iteration of a loader before.

    With persistent workers, it begins only once in the whole run.
    """
    if not isinstance(sampler, Resumable):
        return False
    return sampler._position > 0 or (loader.persistent_workers and sampler._is_resumed)


def _epoch_and_position(state: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the epoch and position of a state.

    Raises:
        UsageError: The state is invalid.
    """
    if isinstance(state, Mapping):
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is int and type(position) is int:
            return epoch, position
    raise UsageError(
        f"{name}: {state!r:.200} given, expected a result of state_dict(), with integers for "
        "epoch and position"
    )


class ResumableSampler(Resumable[T_co]):
    """A wrapper that makes a sampler resumable, such as PyTorch's `DistributedSampler`.

    It yields the items of the sampler from the position on, and skips earlier ones. `set_epoch`,
    `advance`, `at_end`, `state_dict` and `load_state_dict` are those of `GlobalBatchSampler`, and
    the wrapped sampler gets each new epoch. A step is one item, so call `advance` with the size of
    the batch. The world size must be that of the state, because a `DistributedSampler` distributes
    the samples differently at another world size.

    Args:
        sampler: A sampler that has a length and yields the same items in every iteration of an
            epoch.

    Raises:
        UsageError: The sampler has no length, or yields a different order in each iteration, like
            `RandomSampler`.

    Example:
        >>> sampler = ResumableSampler(DistributedSampler(data, seed=1))
        >>> loader = DataLoader(data, batch_size=32, sampler=sampler)
    """

    def __init__(self, sampler: Sampler[T_co]) -> None:
        super().__init__()
        if not hasattr(sampler, "__len__"):
            raise UsageError(
                f"ResumableSampler: {type(sampler).__name__} given, expected a sampler "
                "with a length"
            )
        inner: Any = sampler
        while inner is not None:
            if hasattr(inner, "generator"):  # RandomSampler and similar samplers
                raise UsageError(
                    f"ResumableSampler: {type(inner).__name__} given, which draws a different "
                    "order in each iteration: use GlobalBatchSampler, or DistributedSampler (in "
                    "one process with num_replicas=1, rank=0)"
                )
            inner = getattr(inner, "sampler", None)
        self.sampler: Any = sampler

    def __iter__(self) -> Iterator[T_co]:
        return self._count_items(itertools.islice(self.sampler, self._start_iteration(), None))

    def _set_epoch(self, epoch: int) -> None:
        super()._set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _identity(self) -> dict[str, Any]:
        inner = self.sampler
        identity: dict[str, Any] = {"sampler": type(inner).__name__}
        names = {"world_size": "num_replicas", "seed": "seed", "shuffle": "shuffle"}
        identity |= {
            key: getattr(inner, name) for key, name in names.items() if hasattr(inner, name)
        }
        data = getattr(inner, "dataset", None)
        if isinstance(data, Sized):
            identity["samples"] = len(data)
        return {**identity, "items": len(inner)}

    def _end_position(self) -> int:
        return len(self.sampler)

    def _steps_left(self, position: int) -> int:
        return len(self.sampler) - position


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

    Example:
        >>> [per_rank_batch_size(10, world_size=4, rank=rank) for rank in range(4)]
        [3, 3, 2, 2]
    """
    _check_rank(world_size, rank)
    if global_batch < world_size:
        raise UsageError(
            f"global batch {global_batch} given for world size {world_size}, expected at least "
            "one sample per rank: give a larger global batch, or start fewer ranks"
        )
    start, stop = _rank_slice(global_batch, world_size, rank)
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
    the beginning of the iteration; `len()` is the same on every rank.

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

    Example:
        >>> sampler = GlobalBatchSampler(data, 32, seed=1)
        >>> loader = DataLoader(data, batch_sampler=sampler)
        >>> for step, (inputs, targets) in enumerate(loader):
        ...     optimizer.zero_grad()
        ...     F.cross_entropy(model(inputs), targets).backward()
        ...     average_gradients(model, weight=sampler.weight(step))
        ...     optimizer.step()
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
        self.global_batch = self._stride = global_batch
        self.world_size, self.rank = _resolve_rank(world_size, rank)
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

        Example:
            >>> sampler = GlobalBatchSampler(range(10), 10, world_size=4, rank=0)
            >>> sampler.weight(0)
            0.3
        """
        steps = self._steps_left(self._start)
        if not 0 <= step < steps:
            raise UsageError(f"weight: step {step} given, expected 0 to {steps - 1}")
        size = min(self.global_batch, self.samples - self._start - step * self.global_batch)
        start, stop = _rank_slice(size, self.world_size, self.rank)
        return (stop - start) / size

    def __iter__(self) -> Iterator[list[int]]:
        return self._count_items(self._batches(self._start_iteration(), self._order()))

    def _batches(self, start: int, order: Tensor) -> Iterator[list[int]]:
        for step in range(self._steps_left(start)):
            batch = order[start + step * self.global_batch :][: self.global_batch]
            first, last = _rank_slice(len(batch), self.world_size, self.rank)
            yield batch[first:last].tolist() or batch[:1].tolist()

    def _order(self) -> Tensor:
        """Return the indices of the samples in the order of the epoch, int64 [samples]."""
        key = (self.epoch, self.seed, self.shuffle)
        if self._cached_order is None or self._cached_order[0] != key:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            shuffled = torch.randperm(self.samples, generator=generator, device="cpu")
            self._cached_order = (
                key,
                shuffled if self.shuffle else torch.arange(self.samples, device="cpu"),
            )
        return self._cached_order[1]

    def _identity(self) -> dict[str, Any]:
        # PyTorch does not guarantee that its versions shuffle in the same way.
        checksum = zlib.crc32(self._order()[:_CHECKED_SAMPLES].numpy().tobytes())
        settings = {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle}
        return {"sampler": "GlobalBatchSampler", **settings, "order": checksum}

    def _end_position(self) -> int:
        return self.samples

    def _steps_left(self, position: int) -> int:
        whole, rest = divmod(self.samples - position, self.global_batch)
        return whole + (rest > 0 and not self.drop_last)


class EvaluationSampler(Resumable[int]):
    """A sampler that assigns each sample to exactly one rank, in the order of the data set.

    PyTorch's `DistributedSampler` repeats or drops samples until all ranks have the same number, so
    the accuracy is that of a different set. Here rank `r` has samples `r`, `r + world size`, ...;
    some ranks may have one more than others, and with fewer samples than ranks some have none. The
    number of batches may therefore differ between ranks. Do not use collectives in the loop;
    combine the results with `mean_over_ranks` after it, or run the loop through
    `join_uneven_inputs`.

    Pass it to a `DataLoader` as `sampler`, with any `batch_size`. It resumes like
    `GlobalBatchSampler`, at any world size, if each rank calls `advance(samples)` with the number
    of its own samples that it has processed. Save rank 0's state when all ranks have made the same
    number of steps.

    Args:
        data: The data set, or any object with a length.
        world_size: Number of ranks; by default that of the default group, or 1 without a group.
        rank: This rank; by default that in the default group, or 0 without a group. Give both
            `world_size` and `rank`, or neither.

    Raises:
        UsageError: The data set is empty, or the rank is not in `[0, world_size)`.

    Example:
        >>> loader = DataLoader(data, batch_size=64, sampler=EvaluationSampler(data))
        >>> correct = seen = 0
        >>> for inputs, targets in loader:
        ...     correct += int((model(inputs).argmax(1) == targets).sum())
        ...     seen += len(targets)
        >>> accuracy = mean_over_ranks(correct, seen)
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
        self.world_size, self.rank = _resolve_rank(world_size, rank)
        # A step covers one sample on each rank, so the ranks together cover a prefix of the set.
        self._stride = self.world_size
        if self.samples == 0:
            raise UsageError("EvaluationSampler: 0 samples given, expected at least 1")

    def __iter__(self) -> Iterator[int]:
        own = range(self._start_iteration() + self.rank, self.samples, self.world_size)
        return self._count_items(iter(own))

    def _identity(self) -> dict[str, Any]:
        return {"sampler": "EvaluationSampler", "samples": self.samples}

    def _end_position(self) -> int:
        return self.samples

    def _is_over(self, position: int) -> bool:
        return position >= self.samples  # this rank may have one sample less than others

    def _steps_left(self, position: int) -> int:
        return len(range(position + self.rank, self.samples, self.world_size))


def _resolve_rank(world_size: int | None, rank: int | None) -> tuple[int, int]:
    """Return the given world size and rank, or those of the default group, or (1, 0) without one.

    Raises:
        UsageError: Only one of them is given, or the rank is not in `[0, world_size)`.
    """
    if (world_size is None) != (rank is None):
        raise UsageError(
            f"world size {world_size} and rank {rank} given, expected both or none of them"
        )
    if world_size is not None and rank is not None:
        _check_rank(world_size, rank)
        return world_size, rank
    return world_size_and_rank(None, "")


def _check_rank(world_size: int, rank: int) -> None:
    """Raise UsageError if the rank is not in `[0, world_size)` or there are no ranks."""
    if world_size < 1:
        raise UsageError(f"world size {world_size} given, expected at least 1")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} given, expected 0 to {world_size - 1}")


def _rank_slice(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the start and stop of a rank's slice of `size` samples."""
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)
