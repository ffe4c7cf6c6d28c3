"""Loops over uneven inputs, in which a rank that runs out of data does not block the others."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.ranks import sum_over_ranks, world_size_and_rank
from phalanx.errors import PhalanxError, UsageError

T = TypeVar("T")

# Values that a rank sends instead of its number of samples.
_ENDED, _NO_BATCH, _FAILED = -1, -2, -3
_END = object()


def join_uneven_inputs(
    loader: Iterable[T],
    group: dist.ProcessGroup | None = None,
    *,
    example: T | None = None,
    size: Callable[[T], int] | None = None,
) -> Iterator[tuple[T, float]]:
    """Yield batches with weights, equally often on every rank, until all ranks run out of data.

    Before each step the ranks agree by an all-reduce of one int64 per rank. A rank that has run out
    of data gets its last batch again, with weight 0. It makes the same steps as the others, so
    every collective in the loop includes all ranks. The weights of a step sum to 1 over the ranks.

    A mean over the batch times the weight, summed over the ranks, is the mean over all samples of
    the step. Therefore call `average_gradients(model, weight=weight)`. If gradients are averaged
    over the ranks (DDP, `SharedDataParallel`), call `(loss * weight * world_size).backward()`
    instead, which needs a finite loss on every rank.

    The loop body also runs for batches of weight 0. Multiply everything that counts by the weight.
    The statistics of BatchNorm include the repeated batch.

    All ranks of the group must run the loop to its end. If a rank leaves it early (break, return,
    an exception), the next collective of the other ranks fails as defined by the backend; "phalanx"
    names the rank. If a loader raises an exception, all ranks are notified. Without a process group
    it is a plain loop.

    Args:
        loader: Any iterable, such as a `DataLoader` (even of an iterable data set) or a generator.
            It needs no length.
        group: The group that makes the steps; the default group if None.
        example: The batch, with weight 0, for a rank that has no batch of its own. Required on
            ranks that may have no data at all.
        size: A function that returns the number of samples in a batch; `count_samples` if None.
            `lambda batch: 1` gives all ranks that have data the same weight.

    Yields:
        The batch and its weight, from 0 to 1.

    Raises:
        UsageError: A rank has no batch and no example while others have data (on all ranks), or
            this rank is not in the group.
        PhalanxError: The loader or `size` of another rank raised; the message names the rank.
        torch.distributed.DistBackendError: A rank died or did not join the collective.

    Example:
        >>> for (images, labels), weight in join_uneven_inputs(loader):
        ...     optimizer.zero_grad()
        ...     F.cross_entropy(model(images), labels).backward()
        ...     average_gradients(model, weight=weight)
        ...     optimizer.step()
    """
    return _UnevenLoop(
        "join_uneven_inputs", loader, group, size or count_samples, example
    ).join_uneven_inputs()


def truncate_uneven_inputs(
    loader: Iterable[T],
    group: dist.ProcessGroup | None = None,
    *,
    size: Callable[[T], int] | None = None,
) -> Iterator[tuple[T, float]]:
    """Yield batches with weights until the first rank runs out of data; all stop together.

    No batch is repeated, but the remaining data of the other ranks is not used. A batch that they
    fetched for the step that does not happen is dropped. Otherwise as `join_uneven_inputs`.

    Args:
        loader: Any iterable.
        group: The group that makes the steps; the default group if None.
        size: A function that returns the number of samples in a batch; `count_samples` if None.

    Yields:
        The batch and its weight, from 0 to 1.

    Raises:
        UsageError: This rank is not in the group.
        PhalanxError: The loader or `size` of another rank raised; the message names the rank.
        torch.distributed.DistBackendError: A rank died or did not join the collective.

    Example:
        >>> for (images, labels), weight in truncate_uneven_inputs(loader):
        ...     optimizer.zero_grad()
        ...     F.cross_entropy(model(images), labels).backward()
        ...     average_gradients(model, weight=weight)
        ...     optimizer.step()
    """
    return _UnevenLoop(
        "truncate_uneven_inputs", loader, group, size or count_samples, None
    ).truncate_uneven_inputs()


def count_samples(batch: object) -> int:
    """Return the length of the first tensor with a dimension in a batch, including nested ones.

    Raises:
        UsageError: The batch has no tensor with at least one dimension.

    Example:
        >>> count_samples({"ids": torch.zeros(8, 128), "mask": torch.ones(8, 128)})
        8
    """
    if (tensor := _first_tensor(batch)) is None:
        raise UsageError(
            f"{type(batch).__name__} given, expected a batch with a tensor of at least one "
            "dimension: give size=, a function that returns the number of samples, such as size=len"
        )
    return len(tensor)


def _first_tensor(batch: object) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return next((found for part in batch if (found := _first_tensor(part)) is not None), None)
    return None


@dataclass
class _UnevenLoop(Generic[T]):
    """The steps of one loop, on this rank."""

    caller: str
    loader: Iterable[T]
    group: dist.ProcessGroup | None
    size: Callable[[T], int]
    batch: T | None  # the last batch, or the example
    iterator: Iterator[T] | None = None
    step: int = 0
    ended: bool = False
    error: Exception | None = None
    world_size: int = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.loader, Iterable):
            raise UsageError(
                f"{self.caller}: {type(self.loader).__name__} given, expected an iterable, "
                "such as a DataLoader"
            )
        self.world_size, self.rank = world_size_and_rank(self.group, self.caller)

    def join_uneven_inputs(self) -> Iterator[tuple[T, float]]:
        while max(sizes := self.exchange_sizes()) >= 0:
            self.check_batches(sizes)
            yield self.weighted_batch(sizes)

    def truncate_uneven_inputs(self) -> Iterator[tuple[T, float]]:
        while min(sizes := self.exchange_sizes()) >= 0:
            yield self.weighted_batch(sizes)

    def exchange_sizes(self) -> list[int]:
        """Fetch a batch; return each rank's number of samples or status code. Collective."""
        values: list[int | float] = [0] * self.world_size
        values[self.rank] = self.fetch()
        self.step += 1
        try:
            sizes = [int(size) for size in sum_over_ranks(values, torch.int64, self.group)]
        finally:
            if self.error is not None:
                raise self.error
        if failed := [rank for rank, size in enumerate(sizes) if size == _FAILED]:
            raise PhalanxError(
                f"{self.caller}: {_format_ranks(failed)} raised while it fetched the batch of step "
                f"{self.step} (counted from 1): see the error of that rank",
                ranks=[dist.get_process_group_ranks(self.group)[rank] for rank in failed],
            )
        return sizes

    def fetch(self) -> int:
        if self.ended:
            return _NO_BATCH if self.batch is None else _ENDED
        try:
            if self.iterator is None:
                self.iterator = iter(self.loader)
            batch = next(self.iterator, _END)
            if batch is not _END:
                self.batch = cast(T, batch)
                return self.count(self.batch)
        except Exception as error:  # noqa: BLE001 - raised after the waiting ranks are notified
            self.error = error
            return _FAILED
        self.ended = True
        return self.fetch()

    def count(self, batch: T) -> int:
        size = self.size(batch)
        if type(size) is not int or size < 0:
            raise UsageError(
                f"{self.caller}: size= returned {size!r}, expected an integer of at least 0"
            )
        return size

    def check_batches(self, sizes: list[int]) -> None:
        if missing := [rank for rank, size in enumerate(sizes) if size == _NO_BATCH]:
            raise UsageError(
                f"{self.caller}: {_format_ranks(missing)} of {self.world_size} had no batch and no "
                "example, while other ranks have data: give a batch as example= (its weight is "
                "0), give each rank data, or start fewer ranks"
            )

    def weighted_batch(self, sizes: list[int]) -> tuple[T, float]:
        total = sum(max(size, 0) for size in sizes)
        if total == 0:
            raise UsageError(
                f"{self.caller}: batches of 0 samples given on all ranks in step {self.step} "
                "(counted from 1), expected a sample on at least one rank"
            )
        return cast(T, self.batch), max(sizes[self.rank], 0) / total


def _format_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
