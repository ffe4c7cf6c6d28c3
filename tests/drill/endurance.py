"""Small operations of all kinds for a long time: memory and descriptors must stay as they are."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist

from tests.drill import calls
from tests.drill.calls import Call, Prepared
from tests.drill.leaks import Holdings, settled
from tests.drill.pool import Place, Pool

# Seconds of a group's timeout.
TIMEOUT = 60.0
SAMPLES = 100
# After so many operations a group is formed, used and left.
REGROUP = 50_000
# Bytes by which a process may differ at the end from what it was after the first tenth: an
# allocator's and the kernel's own rounding, one byte in five operations at ten million.
SLACK = 2 * 2**20

_ROUND = 1000
_COUNTS = (0, 1, 3, 16, 64)


@dataclass(frozen=True)
class Sample:
    """What a rank held when it had carried out so many operations."""

    operations: int
    seconds: float
    holds: Holdings
    blocks: int
    """Allocated by Python's own allocator."""


@dataclass(frozen=True)
class Verdict:
    """How a rank's holdings developed from the first tenth of its operations on.

    Attributes:
        resident: Bytes more in the last tenth than in the second, by their medians.
        blocks: The same for Python's blocks.
        more: What else there is more of at the end.
    """

    resident: int
    blocks: int
    more: list[str]

    @property
    def flat(self) -> bool:
        """Whether nothing grows."""
        return self.resident <= SLACK and not self.more


def rank_of(place: Place, seed: int, count: int) -> list[Sample]:
    """What each rank runs: rounds of the same thousand calls, drawn at random from all kinds."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    place.form("phalanx", TIMEOUT)
    ready = _ready(Random(f"{seed} calls"), place.size)
    order = Random(f"{seed} order")
    plan = [order.choice(ready) for _ in range(_ROUND)]
    start, samples, every = time.monotonic(), list[Sample](), max(_ROUND, count // SAMPLES)
    for done in range(0, count, _ROUND):
        if done % every < _ROUND:
            samples.append(_sample(done, start))
        if done % REGROUP == 0:
            _regroup(place)
        for run in plan[: count - done]:
            run()
    samples.append(_sample(count, start))
    dist.destroy_process_group()
    return samples


def _ready(random: Random, size: int) -> list[Callable[[], None]]:
    """Small calls of every kind and in every way, each as often as its weight says."""
    ready = []
    for kind in calls.LINES:
        # These pickle, or wait several times.
        times = 1 if kind in calls.BLOCKING else 4
        for _ in range(times):
            drawn = calls.draw(random, size, (kind,), len(ready))
            call = dataclasses.replace(drawn, count=random.choice(_COUNTS))
            ready.append(Prepared(call, dist.group.WORLD).run)
    return ready


def _regroup(place: Place) -> None:
    pair = dist.new_group()
    Prepared(Call("all_reduce"), pair).run()
    Prepared(Call("exchange", way="future"), pair).run()
    dist.destroy_process_group(pair)


def _sample(done: int, start: float) -> Sample:
    return Sample(done, time.monotonic() - start, settled(None), sys.getallocatedblocks())


def verdict(samples: list[Sample]) -> Verdict:
    """Look at what one rank held."""
    tenth = max(1, len(samples) // 10)
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]

    def median(of: list[Sample], value: Callable[[Sample], int]) -> int:
        return int(statistics.median(value(sample) for sample in of))

    def growth(value: Callable[[Sample], int]) -> int:
        return median(late, value) - median(early, value)

    resident = growth(lambda sample: sample.holds.resident)
    blocks = growth(lambda sample: sample.blocks)
    return Verdict(resident, blocks, late[-1].holds.exceeds(early[0].holds))


def run(pool: Pool, ranks: int, seed: int, count: int, limit: float) -> list[list[Sample]]:
    """The samples of each rank.

    Raises:
        RuntimeError: A rank failed or hung.
    """
    pool.begin(ranks, rank_of, seed, count)
    answers = pool.finish(ranks, limit)
    for rank, answer in enumerate(answers):
        if answer.value is None:
            ended = pool.replace(rank, dead=not answer.hung)
            raise RuntimeError(f"rank {rank}: {answer.error or ended}")
    return [answer.value for answer in answers]
