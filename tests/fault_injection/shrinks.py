"""Shrinks: ranks die one after another or together; the survivors continue by `phalanx.shrink`.

A trial begins with one group. In each stage, one or two ranks die at a random moment: in
operations, while the survivors of the stage before still agree, or while those of this stage do.
All survivors must have the same ranks afterwards, with right results. The measured time starts with
a victim's last instruction, and ends when a survivor has completed the next collective.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import phalanx
from tests.fault_injection import calls
from tests.fault_injection.kills import MOST_GROWTH, SharedPage, open_page
from tests.fault_injection.leaks import Resources, settled_resources
from tests.fault_injection.pool import Pool, TrialRank

# Timeout of a group in seconds; no rank may reach it.
TIMEOUT = 20.0
# Operations between two checks of results.
CYCLE = 4
_FIRST_WORD = 2  # of the page, of the times of death


@dataclass(frozen=True)
class Stage:
    """Deaths that follow each other so soon that one shrink may see them all."""

    victims: tuple[int, ...]
    """The ranks that die, as numbers at the start of the trial."""
    delays: tuple[float, ...]
    """Seconds from the begin of the stage to each death."""


@dataclass(frozen=True)
class Shrinking:
    """A trial, drawn from its `seed`."""

    number: int
    seed: str
    ranks: int
    stages: tuple[Stage, ...]
    hosts: int = 1
    """The number of hosts that are simulated; rank n is on host n modulo this number."""

    @property
    def victims(self) -> set[int]:
        return {victim for stage in self.stages for victim in stage.victims}

    def __str__(self) -> str:
        deaths = "; ".join(
            ", ".join(
                f"rank {victim} after {delay * 1e3:.1f} ms"
                for victim, delay in zip(stage.victims, stage.delays, strict=True)
            )
            for stage in self.stages
        )
        return f"of {self.ranks} ranks die: {deaths}"


def draw(seed: int, number: int, least: int, most: int, hosts: int = 1) -> Shrinking:
    """Draw trial `number` of a seed, on `least` to `most` ranks, of which one or more survive."""
    text = f"{seed} shrink {number}"
    random = Random(text)
    ranks = random.randint(least, most)
    left = random.sample(range(ranks), ranks)
    stages = []
    while len(left) > 1:
        count = min(random.choice((1, 1, 2)), len(left) - 1)
        victims = tuple(left.pop() for _ in range(count))
        first = random.choice((0.0, random.uniform(0, 0.003), random.uniform(0, 0.04)))
        delays = (first, first + random.choice((0.0, random.uniform(0, 0.025))))
        stages.append(Stage(victims, delays[:count]))
        if random.random() < 0.1:
            break
    return Shrinking(number, text, ranks, tuple(stages), hosts)


@dataclass(frozen=True)
class Survived:
    """A survivor's record of a trial."""

    finishes: list[tuple[tuple[int, ...], int]]
    """For each group, its ranks as numbers at the start, and when it had completed a collective."""
    first_resources: Resources
    resources: Resources


_first_resources: list[Resources] = []


def run_rank(trial_rank: TrialRank, trial: Shrinking, page: tuple[int, int]) -> Survived:
    """Run operations and shrink the group until all victims are dead."""
    torch.set_num_threads(1)
    if trial.hosts > 1:
        os.environ["PHALANX_HOST_ID"] = f"host-{trial_rank.rank % trial.hosts}"
    trial_rank.form("phalanx", TIMEOUT)
    with open_page(page) as words:
        finishes = _run_stages(trial_rank.rank, trial, words)
    dist.destroy_process_group()
    resources = settled_resources(_first_resources[0] if _first_resources else None)
    if not _first_resources:
        _first_resources.append(resources)
    return Survived(finishes, _first_resources[0], resources)


def _run_stages(own: int, trial: Shrinking, words: memoryview) -> list[tuple[tuple[int, ...], int]]:
    members = tuple(range(trial.ranks))
    dist.barrier()
    finishes = [(members, time.monotonic_ns())]
    _schedule_death(own, trial, members, words)
    while set(members) & trial.victims:
        _run_until_failure(trial, members)
        members = _shrink(members)
        finishes.append((members, time.monotonic_ns()))
        _schedule_death(own, trial, members, words)
    for number in range(CYCLE):
        _check_sum(trial, members, number)
    return finishes


def _schedule_death(own: int, trial: Shrinking, members: Sequence[int], words: memoryview) -> None:
    """Have this rank die in a while if it is one of the next victims."""
    stage = next((each for each in trial.stages if {*each.victims} & {*members}), None)
    if stage is None or own not in stage.victims:
        return
    delay = stage.delays[stage.victims.index(own)]

    def die() -> None:
        time.sleep(delay)
        words[_FIRST_WORD + own] = time.monotonic_ns()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def _run_until_failure(trial: Shrinking, members: tuple[int, ...]) -> None:
    random, number = Random(f"{trial.seed} {members}"), 0
    drawn = [calls.draw(random, len(members), tag=tag) for tag in range(CYCLE)]
    ready = [calls.PreparedCall(call, dist.group.WORLD) for call in drawn]
    try:
        while True:
            ready[number % CYCLE].run()
            _check_sum(trial, members, number)
            number += 1
    except phalanx.PhalanxError:
        return


def _check_sum(trial: Shrinking, members: tuple[int, ...], number: int) -> None:
    """Check an all-reduce of random data against numpy."""
    count = (5, 3000, 70_001)[number % 3]
    seed = len(trial.seed) + trial.number
    data = [
        np.random.default_rng((seed, number, member)).integers(-99, 99, count) for member in members
    ]
    tensor = torch.from_numpy(data[dist.get_rank()].copy())
    dist.all_reduce(tensor)
    if not (tensor.numpy() == np.sum(data, 0)).all():
        raise AssertionError(f"wrong sum of {count} elements with the ranks {members}")


def _shrink(members: tuple[int, ...]) -> tuple[int, ...]:
    """Shrink until a collective shows that all survivors have the same ranks; return them."""
    while True:
        change = phalanx.shrink()
        members = tuple(members[rank] for rank in change.former_ranks)
        gathered: list[Any] = [None] * change.world_size
        try:
            dist.all_gather_object(gathered, members)
        except phalanx.PhalanxError:
            continue
        if set(gathered) != {members}:
            raise AssertionError(f"the survivors disagree: {gathered}")
        return members


@dataclass
class Trial:
    """A trial and its results."""

    shrinking: Shrinking
    times: list[float] = field(default_factory=list)
    """Seconds from a death to a survivor's next collective without that rank."""
    shrinks: int = 0
    wrong: list[str] = field(default_factory=list)
    """Descriptions of failures."""
    growth: int = 0
    """The largest growth of a survivor in bytes since its first trial."""


def run(pool: Pool, shrinking: Shrinking, page: SharedPage) -> Trial:
    """Run a trial, then replace the ranks that died."""
    page.clear()
    pool.begin(shrinking.ranks, run_rank, shrinking, page.address)
    answers = pool.finish(shrinking.ranks, TIMEOUT + 10)
    trial = Trial(shrinking)
    for rank, answer in enumerate(answers):
        if rank in shrinking.victims:
            ended = pool.replace(rank, has_died=True)
            if ended.hung or ended.code != -signal.SIGKILL:
                trial.wrong.append(f"rank {rank} did not die: {answer.error or ended}")
        elif isinstance(answer.value, Survived):
            _judge(trial, rank, answer.value, page)
        else:
            ended = pool.replace(rank, has_died=not answer.hung)
            trial.wrong.append(f"rank {rank}: {answer.error or ended}")
    return trial


def _judge(trial: Trial, rank: int, survived: Survived, page: SharedPage) -> None:
    """Measure the times of a survivor, and check its ranks and its resources."""
    expected = {*range(trial.shrinking.ranks)} - trial.shrinking.victims
    if {*survived.finishes[-1][0]} != expected:
        trial.wrong.append(f"rank {rank} ends with {survived.finishes[-1][0]}, not {expected}")
    for (before, _), (after, finish) in zip(survived.finishes, survived.finishes[1:], strict=False):
        trial.shrinks += 1
        lost = {*before} - {*after}
        if not lost <= trial.shrinking.victims:
            trial.wrong.append(f"rank {rank} lost {lost}, which are alive")
        deaths = [page.death_of(each) for each in lost]
        if deaths and all(deaths):
            trial.times.append((finish - max(deaths)) / 1e9)
    trial.growth = max(
        trial.growth, survived.resources.resident - survived.first_resources.resident
    )
    if more := survived.resources.exceeds(survived.first_resources):
        trial.wrong.append(f"rank {rank} holds more {', '.join(more)} than after its first trial")
    if trial.growth > MOST_GROWTH:
        trial.wrong.append(f"rank {rank} has grown by {trial.growth >> 20} MiB")
