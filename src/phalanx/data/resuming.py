"""Samplers that go on in the middle of an epoch, and a wrapper for those that can't."""

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
    """A sampler with a position: how much of the epoch's order has been trained on.

    What a `DataLoader` has fetched isn't what has been trained on: with workers it draws several
    batches ahead. So only the loop knows, and says so with `advance` after each step. An iteration
    begins at the position. One that is made after the epoch's end begins the epoch anew.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._position = 0
        self._start = 0  # the position at which the current or next iteration begins
        self._begun = False  # there is a current iteration
        self._anew = False  # the epoch has ended here: the next iteration is another one
        self._drawn = 0
        self._warned = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and with it the order of the samples, that the next iteration yields.

        Call it on every rank before each epoch; otherwise every epoch has the same order. The epoch
        that it is in already, as after `load_state_dict`, goes on where it is; another one begins
        at its first sample.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._go_to(0)

    def advance(self, steps: int = 1) -> None:
        """Say that the next `steps` items of this sampler have been trained on.

        An item is what the sampler yields: a batch of `GlobalBatchSampler`, a sample of the others.
        Call it on every rank after `optimizer.step()`; it doesn't communicate. Who never resumes
        needn't.

        Raises:
            UsageError: Fewer steps are left in the epoch, or a negative number is given.
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
        """Return where the epoch stands: numbers and words only, fit for JSON.

        It holds the epoch, the position, and what the order depends on. It is the same on every
        rank once all have made the same number of steps: save rank 0's, give it to all.
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
        """Go on where `state` was taken: the next iteration yields what was left of its epoch.

        If nothing was left, it yields nothing, and the iteration after it the next whole epoch. So
        `for epoch in range(sampler.epoch, epochs)` with `sampler.set_epoch(epoch)` does what is
        left. Iterators that exist already don't notice.

        Raises:
            UsageError: A state of another sampler, data set, seed or order, or no such state; the
                sampler stays as it was.
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
        """Return the position at which the iteration that is being made begins."""
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
        """Return the items of the current iteration; once it has ended, those of the next."""
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
        """Return what the order of epoch `self.epoch` depends on."""

    @abstractmethod
    def _size(self) -> int:
        """Return the position at the end of an epoch."""

    @abstractmethod
    def _stride(self) -> int:
        """Return by how much a step moves the position."""

    @abstractmethod
    def _left(self, position: int) -> int:
        """Return the steps that this rank makes from a position to the end of the epoch."""


def _numbers(state: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return epoch and position of a state; UsageError if it is no state."""
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
    """Make a sampler resumable, such as PyTorch's `DistributedSampler`: skip what was consumed.

    It yields what the sampler yields, from the position on: `set_epoch`, `advance`, `state_dict`
    and `load_state_dict` are those of `GlobalBatchSampler`, and a step is one item (give `advance`
    the size of the batch). The world size must be that of the state: a `DistributedSampler`
    of another one deals the samples out anew.

    Args:
        sampler: Has a length, and yields the same items each time it is iterated in an epoch.

    Raises:
        UsageError: No length; or a sampler that draws another order at each iteration, such as
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
            if hasattr(inner, "generator"):  # of RandomSampler and its like
                raise UsageError(
                    f"ResumableSampler: {type(inner).__name__} given, which draws another order at "
                    "each iteration: use GlobalBatchSampler, or DistributedSampler (in one process "
                    "with num_replicas=1, rank=0)"
                )
            inner = getattr(inner, "sampler", None)
        self.sampler: Any = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch here and in the sampler within, if it knows epochs."""
        super().set_epoch(epoch)
        self._tell_epoch()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; see `Resumable.load_state_dict`."""
        super().load_state_dict(state)
        self._tell_epoch()

    def __len__(self) -> int:
        """Return the items of the current iteration; once it has ended, those of the next."""
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
