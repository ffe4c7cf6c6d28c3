"""The seed that a `DataLoader` draws when it begins to iterate, and epochs that continue.

Each iteration of a loader begins with a draw of the seed of its workers, even without workers. The
draw comes from the loader's `generator`, by default from the generator that dropout uses. An epoch
that is interrupted and continues has one iteration more than an uninterrupted one. Its additional
draw must not count, or all later random numbers differ.

A sampler cannot undo the draw. A loader that makes batches of a sampler's items asks the sampler
for the first time when the first batch is due, and the state before the draw is lost by then.
Therefore `DataLoader.__iter__` is wrapped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


@functools.cache
def discard_seed_if(continues: Callable[[object, DataLoader[Any]], bool]) -> None:
    """Have each `DataLoader` leave its generator unchanged when it begins to iterate a sampler.

    Loaders behave as before for all samplers for which `continues` returns False.

    Args:
        continues: A function that gets a sampler and its loader, and returns whether an
            uninterrupted run has drawn the seed before.
    """
    begin: Callable[[DataLoader[Any]], Any] = DataLoader.__iter__

    @functools.wraps(begin)
    def begin_iteration(self: DataLoader[Any]) -> Any:
        if not any(continues(sampler, self) for sampler in _samplers(self)):
            return begin(self)
        with _unchanged(self.generator):
            return begin(self)

    DataLoader.__iter__ = begin_iteration  # type: ignore[method-assign]


def _samplers(loader: DataLoader[Any]) -> Iterator[object]:
    """Yield the sampler that a loader iterates, and the samplers in it."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


@contextlib.contextmanager
def _unchanged(generator: torch.Generator | None) -> Iterator[None]:
    """Restore the state of a generator at the end; of the default generator if it is None."""
    if generator is not None:
        state = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(state)
        return
    device = torch.get_default_device()  # of the tensor that the loader fills with the draw
    others = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(others, device_type=device.type):
        yield
