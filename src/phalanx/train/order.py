"""Which samples come next: epochs of steps, and the micro-batches of a step with their weights."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from phalanx.data import GlobalBatchSampler
from phalanx.errors import UsageError
from phalanx.train.seeds import rank_seeds

__all__ = ["MicroBatch", "Order", "make_loader"]

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class MicroBatch:
    """What a rank takes forward and backward at once.

    Attributes:
        content: As the `DataLoader` gives it.
        weight: This rank's part of it in the samples of the step; 0 if it only makes up the number.
    """

    content: Any
    weight: float


class Order:
    """The samples of all epochs in their order, and how far training is in it.

    The position is counted in samples of an epoch's order that a finished step was made of, never
    in what a `DataLoader` has fetched. So it means the same at any world size and global batch.

    Attributes:
        by_workers: Whether batches are made by other processes, and nothing here is changed by
            waiting for one.

    Args:
        data: The data set.
        global_batch: Samples in a step of all ranks together.
        accumulate: Micro-batches in a step.
        seed: Of the shuffle.
        loader: Arguments for `DataLoader`.
    """

    def __init__(
        self,
        data: Dataset[Any],
        global_batch: int,
        accumulate: int,
        seed: int,
        loader: Mapping[str, Any],
    ) -> None:
        if accumulate < 1 or global_batch % accumulate:
            raise UsageError(
                f"accumulate is {accumulate} with a global batch of {global_batch}, expected a "
                "number of micro-batches that divides the global batch"
            )
        self.accumulate = accumulate
        self.by_workers = bool(loader.get("num_workers"))
        self._micro = global_batch // accumulate
        try:
            self._sampler = GlobalBatchSampler(data, self._micro, seed=seed)
        except UsageError as error:
            raise UsageError(
                f"a global batch of {global_batch} in {accumulate} micro-batches given: {error}"
            ) from None
        self._seed = seed
        # Its own: each new iterator draws a number from it, and a resumed epoch has one more of
        # these than one that wasn't interrupted.
        self._generator = torch.Generator()
        self._loader = self._make_loader(data, loader)
        self.samples, self.position = self._sampler.samples, 0
        if self.samples < self._sampler.world_size:
            raise UsageError(
                f"a data set of {self.samples} samples given for {self._sampler.world_size} ranks, "
                "expected at least one sample per rank: start fewer ranks, or give more data"
            )

    def _make_loader(self, data: Dataset[Any], options: Mapping[str, Any]) -> DataLoader[Any]:
        own = {"batch_sampler", "sampler", "shuffle", "drop_last", "generator"} & set(options)
        if options.get("persistent_workers"):
            raise UsageError(
                "loader has persistent_workers, whose random numbers go on from epoch to epoch, so "
                "that no run could resume exactly: leave it out"
            )
        if own or options.get("batch_size") is not None:
            names = ", ".join(sorted(own) or ["batch_size"])
            raise UsageError(
                f"loader has {names}, which the trainer decides itself: leave it out, and give "
                "global_batch, accumulate and seed"
            )
        return make_loader(data, self._sampler, self._generator, options)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next step belongs to."""
        return self._sampler.epoch

    @property
    def at_end(self) -> bool:
        """Whether all samples of the epoch have been trained on."""
        return self.position >= self.samples

    def next_epoch(self) -> None:
        """Go on to the beginning of the next epoch."""
        self._sampler.set_epoch(self.epoch + 1)
        self.position = 0

    def steps(self) -> Generator[list[MicroBatch], None, None]:
        """Yield what is left of the epoch: the micro-batches of each step.

        Every rank gets as many steps, with as many micro-batches each. Nothing counts as trained on
        until `advance` is told. Workers of the loader are ended when this is closed, busy or not.
        """
        # Workers of the loader begin an epoch alike, whatever has been before.
        self._generator.manual_seed(rank_seeds(self._seed, self._sampler.rank, self.epoch)[0])
        firsts = range(self.position, self.samples, self._micro)
        sizes = [min(self._micro, self.samples - first) for first in firsts]
        step: list[tuple[Any, float]] = []
        contents = iter(self._loader)
        try:
            for number, (content, size) in enumerate(zip(contents, sizes, strict=True)):
                step.append((content, self._sampler.weight(number) * size))
                if len(step) == self.accumulate or number == len(sizes) - 1:
                    total = sum(sizes[number + 1 - len(step) : number + 1])
                    yield [MicroBatch(item, own / total) for item, own in step]
                    step = []
        finally:
            _end_workers(contents)

    def advance(self, micro_batches: int) -> int:
        """Count a finished step; returns its samples, of all ranks together."""
        self._sampler.advance(micro_batches)
        before = self.position
        self.position = min(before + micro_batches * self._micro, self.samples)
        return self.position - before

    def state_dict(self) -> dict[str, Any]:
        """Return where training is, for JSON; the same on every rank."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was.

        Raises:
            UsageError: The data set has another size, or another seed gave its order.
        """
        self._sampler.load_state_dict(state)
        self.position = state["position"]


def make_loader(
    data: Dataset[Any], batches: Iterable[list[int]], generator: torch.Generator, options: Any
) -> DataLoader[Any]:
    """Return a loader of batches of indices.

    Args:
        data: The data set.
        batches: The indices of each batch.
        generator: What it seeds its workers from.
        options: What the user wants of `DataLoader`.
    """
    options = {"generator": generator, **options}
    if options.get("num_workers"):
        begin = functools.partial(_begin_worker, options.get("worker_init_fn"))
        options["worker_init_fn"] = begin
    if "batch_size" in options or (type(data) is TensorDataset and "collate_fn" not in options):
        # It is asked for lists of indices, which saves the collation of samples.
        return DataLoader(data, **{**options, "batch_size": None}, sampler=batches)
    return DataLoader(data, **options, batch_sampler=batches)


def _end_workers(contents: Iterator[Any]) -> None:
    # A loader that is let go waits 5 s for each worker that is in the middle of a sample. There is
    # no public way to its processes.
    for worker in getattr(contents, "_workers", ()):
        worker.terminate()


def _begin_worker(then: Callable[[int], None] | None, number: int) -> None:
    # A launcher sends SIGTERM to the group of processes that a rank has started, and the rank still
    # needs its batches: it ends its workers itself. They end with it in any case, busy or not.
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if then is not None:
        then(number)
