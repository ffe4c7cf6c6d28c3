"""The batch schedule: epochs, their steps, and the weighted micro-batches of a step."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from phalanx.data import GlobalBatchSampler
from phalanx.errors import UsageError
from phalanx.launcher.rank_bootstrap import die_with_parent
from phalanx.train.random_generators import rank_seeds


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward and backward pass on a rank.

    Attributes:
        content: The batch as returned by the `DataLoader`.
        weight: The fraction of the step's samples that this batch contributes; 0 for a filler
            batch, which only keeps the number of passes equal on all ranks.
    """

    content: Any
    weight: float


class BatchSchedule:
    """The order of the samples in all epochs, and the position of training in it.

    The position counts the samples of the epoch's order that completed steps have used. It does not
    count samples that a `DataLoader` has only prefetched. It therefore has the same meaning at any
    world size and global batch.

    Attributes:
        epoch: The epoch of the next step, from 0. Unlike a sampler, a schedule stays in an epoch
            that is over until `next_epoch` is called.
        uses_workers: True if worker processes make the batches. Waiting for a batch then changes
            nothing in this process.

    Args:
        data: The data set.
        global_batch: Number of samples in a step, on all ranks together.
        accumulate: Number of micro-batches in a step.
        seed: The seed of the shuffle.
        loader: Arguments for `DataLoader`.

    Raises:
        UsageError: `accumulate` does not divide `global_batch`, there are fewer samples than ranks,
            the global batch is too small, or `loader` sets an option that the trainer controls.
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
        self.uses_workers = bool(loader.get("num_workers"))
        self._micro_batch_size = global_batch // accumulate
        try:
            self._sampler = GlobalBatchSampler(data, self._micro_batch_size, seed=seed)
        except UsageError as error:
            raise UsageError(
                f"a global batch of {global_batch} in {accumulate} micro-batches given: {error}"
            ) from None
        self._seed = seed
        # A separate generator, seeded for each epoch: the seeds of the loader's workers depend
        # neither on earlier epochs nor on the numbers that the model draws.
        self._generator = torch.Generator()
        self._loader = self._make_loader(data, loader)
        self.samples = self._sampler.samples
        self.epoch = self.position = 0
        if self.samples < self._sampler.world_size:
            raise UsageError(
                f"a data set of {self.samples} samples given for {self._sampler.world_size} ranks, "
                "expected at least one sample per rank: start fewer ranks, or give more data"
            )

    def _make_loader(self, data: Dataset[Any], options: Mapping[str, Any]) -> DataLoader[Any]:
        reserved = {"batch_sampler", "sampler", "shuffle", "drop_last", "generator"} & set(options)
        if options.get("persistent_workers"):
            raise UsageError(
                "loader has persistent_workers, whose random states continue from epoch to epoch, "
                "so that a run cannot resume exactly: leave it out"
            )
        if reserved or options.get("batch_size") is not None:
            names = ", ".join(sorted(reserved) or ["batch_size"])
            raise UsageError(
                f"loader has {names}, which the trainer sets itself: leave it out, and give "
                "global_batch, accumulate and seed"
            )
        return make_loader(data, self._sampler, self._generator, options)

    @property
    def at_end(self) -> bool:
        """True if all samples of the epoch have been trained on."""
        return self.position >= self.samples

    def next_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self.epoch, self.position = self.epoch + 1, 0
        self._sampler.set_epoch(self.epoch)

    def steps(self) -> Generator[list[MicroBatch], None, None]:
        """Yield the micro-batches of each remaining step of the epoch.

        Every rank gets the same number of steps, with the same number of micro-batches. Samples
        count as trained on only after a call of `advance`. Closing the generator terminates the
        loader's workers, even if they are busy.
        """
        self._generator.manual_seed(rank_seeds(self._seed, self._sampler.rank, self.epoch)[0])
        starts = range(self.position, self.samples, self._micro_batch_size)
        sizes = [min(self._micro_batch_size, self.samples - start) for start in starts]
        step: list[tuple[Any, float]] = []
        contents = iter(self._loader)
        try:
            for number, (content, size) in enumerate(zip(contents, sizes, strict=True)):
                step.append((content, self._sampler.weight(number) * size))
                if len(step) == self.accumulate or number == len(sizes) - 1:
                    total = sum(sizes[number + 1 - len(step) : number + 1])
                    yield [MicroBatch(item, samples / total) for item, samples in step]
                    step = []
        finally:
            _terminate_workers(contents)

    def advance(self, micro_batches: int) -> int:
        """Record a completed step, and return its number of samples on all ranks together."""
        self._sampler.advance(micro_batches)
        before = self.position
        self.position = min(before + micro_batches * self._micro_batch_size, self.samples)
        return self.position - before

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training as JSON values, the same on every rank."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another run.

        Raises:
            UsageError: The data set has a different size, or its order comes from another seed.
        """
        self._sampler.load_state_dict(state)
        resumed = self._sampler.state_dict()
        self.epoch, self.position = resumed["epoch"], resumed["position"]


def make_loader(
    data: Dataset[Any], batches: Iterable[list[int]], generator: torch.Generator, options: Any
) -> DataLoader[Any]:
    """Return a `DataLoader` that loads given batches of indices.

    Args:
        data: The data set.
        batches: The indices of each batch.
        generator: The generator from which the loader seeds its workers.
        options: The user's arguments for `DataLoader`.
    """
    options = {"generator": generator, **options}
    if options.get("num_workers"):
        initialize = functools.partial(_initialize_worker, options.get("worker_init_fn"))
        options["worker_init_fn"] = initialize
    if "batch_size" in options or (type(data) is TensorDataset and "collate_fn" not in options):
        # Index the data set by lists of indices, which avoids collating single samples.
        return DataLoader(data, **{**options, "batch_size": None}, sampler=batches)
    return DataLoader(data, **options, batch_sampler=batches)


def _terminate_workers(contents: Iterator[Any]) -> None:
    # A released loader waits 5 s for each worker that is still making a batch. PyTorch has no
    # public access to the worker processes.
    for worker in getattr(contents, "_workers", ()):
        worker.terminate()


def _initialize_worker(user_init: Callable[[int], None] | None, number: int) -> None:
    # A launcher sends SIGTERM to the process group of a rank, and the rank still needs its batches
    # then. Workers therefore leave that group, and the rank terminates them itself. The parent
    # death signal kills them with the rank in any case, even if they are busy.
    os.setpgid(0, 0)
    die_with_parent(os.getppid())
    if user_init is not None:
        user_init(number)
