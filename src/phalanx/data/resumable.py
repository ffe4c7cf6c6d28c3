"""Samplers that resume in the middle of an epoch, and a wrapper for other samplers."""

import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeVar

from torch.utils.data import Sampler

from phalanx.errors import UsageError

__all__ = ["Resumable", "ResumableSampler"]

T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger(__name__)


class Resumable(Sampler[T_co]):
    """A sampler with a position: the part of the epoch's order that has been trained on.

    A `DataLoader` with workers prefetches several batches, so the items that it has drawn have not
    all been trained on. The training loop must therefore call `advance` after each step. An
    iteration begins at the position. After the end of the epoch it begins at the first item again.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._position = 0
        self._start = 0  # the position at which the current or next iteration begins
        self._is_iterating = False  # True if there is a current iteration
        self._restarts = False  # True if the epoch has ended: the next iteration starts over
        self._items_drawn = 0
        self._warned = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the samples in the next iteration.

        Call it on every rank before each epoch; otherwise every epoch has the same order. If
        `epoch` is the current epoch, as after `load_state_dict`, the position stays. Any other
        epoch begins at its first sample.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._set_position(0)

    def advance(self, steps: int = 1) -> None:
        """Mark the next `steps` items of this sampler as trained on.

        An item is a batch for `GlobalBatchSampler`, and a sample for other samplers. Call it on
        every rank after `optimizer.step()`. It does not communicate. It is not needed if the run
        never resumes.

        Raises:
            UsageError: The epoch has fewer steps left, or `steps` is negative.
        """
        remaining = self._steps_left(self._position)
        if not 0 <= steps <= remaining:
            raise UsageError(
                f"{type(self).__name__}.advance: {steps} given, expected 0 to {remaining}, the "
                f"steps left in epoch {self.epoch}: call set_epoch() before the next epoch"
            )
        if steps == 0:
            return
        self._position = min(self._position + steps * self._stride(), self._end_position())
        self._restarts = steps == remaining
        if not self._is_iterating:
            self._start = self._position

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler: numbers and strings only, suitable for JSON.

        It has the epoch, the position, and the values that determine the order. It is the same on
        all ranks that have made the same number of steps. Save rank 0's state, and load it on all
        ranks.
        """
        if self._items_drawn > 1 and self._position == self._start and not self._warned:
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

        If the epoch has no items left, the next iteration yields nothing, and the one after it a
        whole epoch. `for epoch in range(sampler.epoch, epochs)` with `sampler.set_epoch(epoch)`
        therefore completes the remaining work. Existing iterators are not affected.

        Raises:
            UsageError: The state is of a different sampler, data set, seed or order, or is not a
                valid state. The sampler stays unchanged.
        """
        epoch, position = _epoch_and_position(state, f"{type(self).__name__}.load_state_dict")
        previous, self.epoch = self.epoch, epoch
        try:
            self._check(state, position)
        except UsageError:
            self.epoch = previous
            raise
        self._set_position(position)

    def _start_iteration(self) -> int:
        """Start a new iteration, and return the position at which it begins."""
        if self._restarts:
            self._set_position(0)
        self._start, self._items_drawn, self._is_iterating = self._position, 0, True
        self._restarts = self._steps_left(self._position) == 0
        return self._start

    def _count_items(self, items: Iterator[T_co]) -> Iterator[T_co]:
        for item in items:
            self._items_drawn += 1
            yield item

    def _set_position(self, position: int) -> None:
        self._position = self._start = position
        self._restarts = self._is_iterating = False
        self._items_drawn = 0

    def _steps(self) -> int:
        """Return the number of items in the current iteration, or in the next once it has ended."""
        return self._steps_left(0 if self._restarts else self._start)

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
    def _stride(self) -> int:
        """Return the distance by which a step moves the position."""

    @abstractmethod
    def _steps_left(self, position: int) -> int:
        """Return the number of steps of this rank from a position to the end of the epoch."""


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


class ResumableSampler(Resumable[T_co]):
    """A wrapper that makes a sampler resumable, such as PyTorch's `DistributedSampler`.

    It yields the items of the sampler from the position on, and skips earlier ones. `set_epoch`,
    `advance`, `state_dict` and `load_state_dict` are those of `GlobalBatchSampler`. A step is one
    item, so call `advance` with the size of the batch. The world size must be that of the state,
    because a `DistributedSampler` distributes the samples differently at another world size.

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

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of this sampler, and that of the wrapped sampler if it supports epochs."""
        super().set_epoch(epoch)
        self._forward_epoch()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; see `Resumable.load_state_dict`."""
        super().load_state_dict(state)
        self._forward_epoch()

    def __len__(self) -> int:
        """Return the number of items in the current iteration, or in the next once it has ended."""
        return self._steps()

    def __iter__(self) -> Iterator[T_co]:
        return self._count_items(itertools.islice(self.sampler, self._start_iteration(), None))

    def _forward_epoch(self) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)

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

    def _stride(self) -> int:
        return 1

    def _steps_left(self, position: int) -> int:
        return len(self.sampler) - position
