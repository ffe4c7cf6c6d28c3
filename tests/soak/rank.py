"""Runs a plan on this rank."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

import torch.distributed as dist

from tests.soak import messages, operations
from tests.soak.memory import Pool
from tests.soak.operations import Task
from tests.soak.plan import CHAPTER, MESSAGES, WEIGHTS, Operation, Plan

CARRY_OUT: dict[str, Callable[[Task], object]] = {
    kind: getattr(messages if kind in MESSAGES else operations, kind) for kind in WEIGHTS
}
MOST_OUTSTANDING = 12
MOST_OUTSTANDING_BYTES = 32 * 2**20


class SoakFailed(AssertionError):
    """An operation went wrong: which, how, and what repeats it."""


@dataclass(frozen=True)
class Summary:
    """What one rank has done."""

    operations: int
    """Of the plan, whether or not this rank was in their groups."""
    seconds: float
    checked: float
    """GiB of tensors that were compared."""


@dataclass
class Pending:
    """An operation that has begun."""

    task: Task
    works: list[Any]

    def finish(self, random: Random) -> None:
        """Wait in one of the ways there are, and look at what came out."""
        random.shuffle(self.works)
        for work in self.works:
            if hasattr(work, "get_future") and random.random() < 0.2:
                work.get_future().wait()
            work.wait()
        self.task.check()


class Soak:
    """One rank's way through a plan, in the default group.

    Args:
        plan: What to do.
        timeout: Seconds that an operation of a sub-group may wait for its peers.
        report: Is told the number of the operation that begins.
    """

    def __init__(self, plan: Plan, timeout: float, report: Callable[[int], None]) -> None:
        self._plan = plan
        self._timeout = timedelta(seconds=timeout)
        self._report = report
        self._rank = dist.get_rank()
        self._pool = Pool(plan.seed)
        self._random = Random(f"{plan.seed} waits of {self._rank}")
        self._groups: list[dist.ProcessGroup] = []
        self._pending: list[Pending] = []
        self._bytes = 0

    def run(self, first: int, count: int) -> Summary:
        """Carry out `count` operations from number `first` on."""
        start, done = time.monotonic(), 0
        for number in range(first, first + count):
            if number == first or number % CHAPTER == 0:
                self._regroup(number // CHAPTER)
            self._report(number)
            operation = self._plan.operation(number)
            done += operation is not None
            if operation is not None and self._rank in operation.members:
                self._begin(operation)
                self._finish_some()
        self._regroup(None)
        return Summary(done, time.monotonic() - start, self._bytes / 2**30)

    def _begin(self, operation: Operation) -> None:
        task = Task(operation, self._groups[operation.group], self._pool)
        try:
            works: Any = CARRY_OUT[operation.kind](task)
        except Exception as error:
            raise self._failed(operation, error) from error
        if not isinstance(works, list):
            works = [] if works is None else [works]
        self._bytes += task.bytes
        self._pending.append(Pending(task, works))
        if not works:
            self._finish(len(self._pending) - 1)

    def _finish_some(self) -> None:
        """Wait for operations at random, in any order: none, one, or many."""
        while self._pending and (self._crowded() or self._random.random() < 0.4):
            self._finish(self._random.randrange(len(self._pending)))

    def _crowded(self) -> bool:
        outstanding = sum(pending.task.bytes for pending in self._pending)
        return len(self._pending) > MOST_OUTSTANDING or outstanding > MOST_OUTSTANDING_BYTES

    def _finish(self, index: int) -> None:
        pending = self._pending.pop(index)
        try:
            pending.finish(self._random)
        except Exception as error:
            raise self._failed(pending.task.operation, error) from error

    def _regroup(self, chapter: int | None) -> None:
        """Finish everything, leave the sub-groups, and form those of a chapter."""
        while self._pending:
            self._finish(self._random.randrange(len(self._pending)))
        for group in self._groups[1:]:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        if chapter is not None:
            others = self._plan.groups(chapter)[1:]
            made = [dist.new_group(members, timeout=self._timeout) for members in others]
            self._groups = [dist.group.WORLD, *made]

    def _failed(self, operation: Operation, error: Exception) -> SoakFailed:
        plan, number = self._plan, operation.number
        first = number - number % CHAPTER
        kinds = "" if plan.kinds == WEIGHTS.keys() else f"--kinds {','.join(sorted(plan.kinds))} "
        repeat = f'make soak ARGS="{kinds}--ranks {plan.ranks} --seed {plan.seed} --first'
        return SoakFailed(
            f"rank {self._rank}, operation {number} of seed {plan.seed}: {operation}\n"
            f"    {type(error).__name__}: {error}\n"
            f'repeat it alone:      {repeat} {number} --operations 1"\n'
            f'with what led to it:  {repeat} {first} --operations {number - first + 1}"'
        )


def soak(
    plan: Plan,
    first: int,
    count: int,
    timeout: float,
    report: Callable[[int], None] = lambda number: None,
) -> Summary:
    """Run operations of a plan in the default group.

    Raises:
        SoakFailed: On the rank that saw an operation go wrong.
    """
    # The older names, which every supported PyTorch has, and coalesced forms.
    warnings.filterwarnings("ignore", category=FutureWarning)
    return Soak(plan, timeout, report).run(first, count)
