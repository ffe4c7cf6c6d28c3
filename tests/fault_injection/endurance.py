"""Small operations of all kinds for a long time; memory and descriptors must not grow."""

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

from tests.fault_injection import calls
from tests.fault_injection.calls import Call, PreparedCall
from tests.fault_injection.leaks import Resources, settled_resources
from tests.fault_injection.pool import Pool, TrialRank

# Timeout of a group in seconds.
TIMEOUT = 60.0
SAMPLES = 100
# Number of operations after which a group is formed, used and left.
REGROUP = 50_000
# Bytes by which a process may have grown since its first tenth, because the allocator and the
# kernel round sizes up. At ten million operations, this is one byte for five operations.
SLACK = 2 * 2**20

_ROUND = 1000
_COUNTS = (0, 1, 3, 16, 64)


@dataclass(frozen=True)
class Sample:
    """The resources of a rank after a number of operations."""

    operations: int
    seconds: float
    resources: Resources
    blocks: int
    """Blocks allocated by Python's allocator."""


@dataclass(frozen=True)
class Growth:
    """The growth of a rank's resources since the first tenth of its operations.

    Attributes:
        resident: Growth in bytes from the second to the last tenth, by their medians.
        blocks: The same for Python's blocks.
        more: Names of other resources that have grown.
    """

    resident: int
    blocks: int
    more: list[str]

    @property
    def is_flat(self) -> bool:
        """True if nothing has grown."""
        return self.resident <= SLACK and not self.more


def run_rank(trial_rank: TrialRank, seed: int, count: int) -> list[Sample]:
    """Run rounds of the same thousand calls on a rank, drawn at random from all kinds."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    trial_rank.form("phalanx", TIMEOUT)
    ready = _prepare_calls(Random(f"{seed} calls"), trial_rank.size)
    order = Random(f"{seed} order")
    plan = [order.choice(ready) for _ in range(_ROUND)]
    start, samples, every = time.monotonic(), list[Sample](), max(_ROUND, count // SAMPLES)
    for done in range(0, count, _ROUND):
        if done % every < _ROUND:
            samples.append(_sample(done, start))
        if done % REGROUP == 0:
            _regroup(trial_rank)
        for run in plan[: count - done]:
            run()
    samples.append(_sample(count, start))
    dist.destroy_process_group()
    return samples


def _prepare_calls(random: Random, size: int) -> list[Callable[[], None]]:
    """Prepare small calls of every kind and in every mode."""
    ready = []
    for kind in calls.LINES:
        # Slower: these pickle, or wait several times.
        times = 1 if kind in calls.BLOCKING else 4
        for _ in range(times):
            drawn = calls.draw(random, size, (kind,), len(ready))
            call = dataclasses.replace(drawn, count=random.choice(_COUNTS))
            ready.append(PreparedCall(call, dist.group.WORLD).run)
    return ready


def _regroup(trial_rank: TrialRank) -> None:
    pair = dist.new_group()
    PreparedCall(Call("all_reduce"), pair).run()
    PreparedCall(Call("exchange", mode="future"), pair).run()
    dist.destroy_process_group(pair)


def _sample(done: int, start: float) -> Sample:
    return Sample(done, time.monotonic() - start, settled_resources(None), sys.getallocatedblocks())


def growth(samples: list[Sample]) -> Growth:
    """Compute the growth of one rank."""
    tenth = max(1, len(samples) // 10)
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]

    def median(of: list[Sample], value: Callable[[Sample], int]) -> int:
        return int(statistics.median(value(sample) for sample in of))

    def increase(value: Callable[[Sample], int]) -> int:
        return median(late, value) - median(early, value)

    resident = increase(lambda sample: sample.resources.resident)
    blocks = increase(lambda sample: sample.blocks)
    return Growth(resident, blocks, late[-1].resources.exceeds(early[0].resources))


def run(pool: Pool, ranks: int, seed: int, count: int, limit: float) -> list[list[Sample]]:
    """Run the operations and return the samples of each rank.

    Raises:
        RuntimeError: A rank failed or hung.
    """
    pool.begin(ranks, run_rank, seed, count)
    answers = pool.finish(ranks, limit)
    for rank, answer in enumerate(answers):
        if answer.value is None:
            ended = pool.replace(rank, has_died=not answer.hung)
            raise RuntimeError(f"rank {rank}: {answer.error or ended}")
    return [answer.value for answer in answers]
