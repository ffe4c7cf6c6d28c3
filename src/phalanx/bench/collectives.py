"""Timing collectives: the same ranks, the same buffers, every backend in turn.

How a figure comes about: all backends have a group over the same processes. A round rewrites the
buffers, then runs the operation on each backend in turn, the order rotating from round to round.
The buffers of a size are so many that together they exceed the caches, as far as that makes sense
for small ones, and an operation takes the next one each time. A rank's time for a round is the
mean over the operations in it; the round's is that of the slowest rank. Given are the median over
the rounds and the quartiles.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# More than the last-level cache of the usual server core complex; see BUFFERS_AT_MOST.
_POOL_BYTES = 96 * 2**20
_BUFFERS_AT_MOST = 64


@dataclass(frozen=True)
class Timing:
    """Seconds of one operation.

    Attributes:
        median: Over the rounds.
        low: Lower quartile.
        high: Upper quartile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise the rounds."""
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high)


def all_reduce(
    backends: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    tell: Callable[[int, dict[str, Timing]], None],
) -> dict[int, dict[str, Timing]]:
    """Time float32 SUM all-reduces on this rank; every rank runs this.

    Args:
        backends: Names for `torch.distributed`, "phalanx" and "gloo" for example.
        sizes: Bytes per rank.
        rounds: How often each is timed.
        tell: Called on rank 0 with each size and its timings.

    Returns:
        By size and backend; the same on every rank.
    """
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    groups = {name: dist.new_group(backend=name) for name in backends}
    results = {}
    try:
        for size in sizes:
            results[size] = _time_size(groups, size, rounds)
            if dist.get_rank() == 0:
                tell(size, results[size])
    finally:
        dist.destroy_process_group()
    return results


def _time_size(groups: dict[str, dist.ProcessGroup], size: int, rounds: int) -> dict[str, Timing]:
    count = max(1, size // 4)
    buffers = [torch.empty(count) for _ in range(_buffers_for(size))]
    names = list(groups)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            for buffer in buffers:
                buffer.fill_(1 + number)
            taken = _slowest(_time_round(groups[name], buffers, _operations_for(size)))
            if number >= 0:  # the first round warms up
                seconds[name].append(taken)
    return {name: Timing.of(values) for name, values in seconds.items()}


def _time_round(group: dist.ProcessGroup, buffers: list[torch.Tensor], operations: int) -> float:
    """Seconds per operation, after all ranks have come."""
    dist.barrier(group)
    start = time.perf_counter()
    for number in range(operations):
        dist.all_reduce(buffers[number % len(buffers)], group=group)
    return (time.perf_counter() - start) / operations


def _slowest(seconds: float) -> float:
    taken = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def _buffers_for(size: int) -> int:
    return max(2, min(_BUFFERS_AT_MOST, _POOL_BYTES // max(size, 1)))


def _operations_for(size: int) -> int:
    """Enough that a clock's tick doesn't matter, few enough that Gloo ends within the minute."""
    return 64 if size <= 2**16 else 16 if size <= 2**20 else 3


def label_of(size: int) -> str:
    """A size in words: "256 KiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
