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
        self._begun = False  # True if there is a current iteration
        self._anew = False  # True if the epoch has ended: the next iteration starts over
        self._drawn = 0
        self._warned = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the samples in the next iteration.

        Call it on every rank before each epoch; otherwise every epoch has the same order. If
        `epoch` is the current epoch, as after `load_state_dict`, the position stays. Any other
        epoch begins at its first sample.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._go_to(0)

    def advance(self, steps: int = 1) -> None:
        """Mark the next `steps` items of this sampler as trained on.

        An item is a batch for `GlobalBatchSampler`, and a sample for other samplers. Call it on
        every rank after `optimizer.step()`. It does not communicate. It is not needed if the run
        never resumes.

        Raises:
            UsageError: The epoch has fewer steps left, or `steps` is negative.
        """
        left = self._left(self._position)
        if not 0 <= steps <= left:
            raise UsageError(
                f"{type(self).__name__}.advance: {steps} given, expected 0 to {left}, which are "
                f"left of epoch {self.epoch}: call set_epoch() before the next epoch"
            )
        if steps == 0:
            return
        self._position = min(self._position + steps * self._stride(), self._size())
        self._anew = steps == left
        if not self._begun:
            self._start = self._position

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler: numbers and strings only, suitable for JSON.

        It has the epoch, the position, and the values that determine the order. It is the same on
        all ranks that have made the same number of steps. Save rank 0's state, and load it on all
        ranks.
        """
        if self._drawn > 1 and self._position == self._start and not self._warned:
            self._warned = True
            _log.warning(
                "%s: %d items have been drawn, but advance() not called: the state says that none "
                "of them is done",
                type(self).__name__,
                self._drawn,
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
        epoch, position = _numbers(state, f"{type(self).__name__}.load_state_dict")
        before, self.epoch = self.epoch, epoch
        try:
            self._check(state, position)
        except UsageError:
            self.epoch = before
            raise
        self._go_to(position)

    def _begin(self) -> int:
        """Start a new iteration, and return the position at which it begins."""
        if self._anew:
            self._go_to(0)
        self._start, self._drawn, self._begun = self._position, 0, True
        self._anew = self._left(self._position) == 0
        return self._start

    def _drawing(self, items: Iterator[T_co]) -> Iterator[T_co]:
        for item in items:
            self._drawn += 1
            yield item

    def _go_to(self, position: int) -> None:
        self._position = self._start = position
        self._anew = self._begun = False
        self._drawn = 0

    def _steps(self) -> int:
        """Return the number of items in the current iteration, or in the next once it has ended."""
        return self._left(0 if self._anew else self._start)

    def _check(self, state: Mapping[str, Any], position: int) -> None:
        name = f"{type(self).__name__}.load_state_dict"
        for key, here in self._identity().items():
            if key not in state or state[key] != here:
                there = repr(state[key]) if key in state else "unknown"
                raise UsageError(
                    f"{name}: a state of {key} {there} given, expected {key} {here!r}, as this "
                    f"sampler has: {_ADVICE[key]}"
                )
        if not 0 <= position <= self._size():
            raise UsageError(
                f"{name}: position {position} given, expected 0 to {self._size()}: the state is "
                "damaged"
            )

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the values that determine the order of epoch `self.epoch`."""

    @abstractmethod
    def _size(self) -> int:
        """Return the position at the end of an epoch."""

    @abstractmethod
    def _stride(self) -> int:
        """Return the distance by which a step moves the position."""

    @abstractmethod
    def _left(self, position: int) -> int:
        """Return the number of steps of this rank from a position to the end of the epoch."""


def _numbers(state: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the epoch and position of a state.

    Raises:
        UsageError: The state is invalid.
    """
    if isinstance(state, Mapping):
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is int and type(position) is int:
            return epoch, position
    raise UsageError(
        f"{name}: {state!r:.200} given, expected what state_dict() returned, with whole numbers "
        "for epoch and position"
    )


_ADVICE = {
    "sampler": "resume with the kind of sampler that the state was saved from",
    "samples": "resume with the data set that the state was saved with",
    "items": "resume with the data set that the state was saved with",
    "seed": "make the sampler with the seed of the state",
    "shuffle": "make the sampler with the shuffle of the state",
    "order": "the samples would come in another order: does this version of PyTorch shuffle "
    "differently?",
    "world_size": "resume with as many ranks, or use GlobalBatchSampler, which resumes with any "
    "number of them",
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
                    f"ResumableSampler: {type(inner).__name__} given, which draws another order at "
                    "each iteration: use GlobalBatchSampler, or DistributedSampler (in one process "
                    "with num_replicas=1, rank=0)"
                )
            inner = getattr(inner, "sampler", None)
        self.sampler: Any = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of this sampler, and that of the wrapped sampler if it supports epochs."""
        super().set_epoch(epoch)
        self._tell_epoch()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; see `Resumable.load_state_dict`."""
        super().load_state_dict(state)
        self._tell_epoch()

    def __len__(self) -> int:
        """Return the number of items in the current iteration, or in the next once it has ended."""
        return self._steps()

    def __iter__(self) -> Iterator[T_co]:
        return self._drawing(itertools.islice(self.sampler, self._begin(), None))

    def _tell_epoch(self) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)

    def _identity(self) -> dict[str, Any]:
        inner = self.sampler
        found: dict[str, Any] = {"sampler": type(inner).__name__}
        names = {"world_size": "num_replicas", "seed": "seed", "shuffle": "shuffle"}
        found |= {key: getattr(inner, name) for key, name in names.items() if hasattr(inner, name)}
        data = getattr(inner, "dataset", None)
        if isinstance(data, Sized):
            found["samples"] = len(data)
        return {**found, "items": len(inner)}

    def _size(self) -> int:
        return len(self.sampler)

    def _stride(self) -> int:
        return 1

    def _left(self, position: int) -> int:
        return len(self.sampler) - position
