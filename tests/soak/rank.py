"""Execution of a plan on this rank."""

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

FUNCTIONS: dict[str, Callable[[Task], object]] = {
    kind: getattr(messages if kind in MESSAGES else operations, kind) for kind in WEIGHTS
}
MAX_OUTSTANDING = 12
MAX_OUTSTANDING_BYTES = 32 * 2**20


class SoakFailed(AssertionError):
    """An operation failed; the message names it and says how to repeat it."""


@dataclass(frozen=True)
class Summary:
    """The summary of one rank."""

    operations: int
    """Number of operations of the plan, including those of groups without this rank."""
    seconds: float
    checked: float
    """GiB of checked tensors."""


@dataclass
class Pending:
    """An operation in progress."""

    task: Task
    works: list[Any]

    def finish(self, random: Random) -> None:
        """Wait for the works in random order, by work or future, and check the tensors."""
        random.shuffle(self.works)
        for work in self.works:
            if hasattr(work, "get_future") and random.random() < 0.2:
                work.get_future().wait()
            work.wait()
        self.task.check()


class Soak:
    """The execution of a plan on one rank, in the default group.

    Args:
        plan: The plan.
        timeout: Timeout of the operations of subgroups in seconds.
        report: Function that is called with the number of each operation that begins.
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
        """Run `count` operations, starting with number `first`."""
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
            works: Any = FUNCTIONS[operation.kind](task)
        except Exception as error:
            raise self._make_error(operation, error) from error
        if not isinstance(works, list):
            works = [] if works is None else [works]
        self._bytes += task.bytes
        self._pending.append(Pending(task, works))
        if not works:
            self._finish(len(self._pending) - 1)

    def _finish_some(self) -> None:
        """Wait for a random number of operations, in any order."""
        while self._pending and (self._has_too_many() or self._random.random() < 0.4):
            self._finish(self._random.randrange(len(self._pending)))

    def _has_too_many(self) -> bool:
        outstanding = sum(pending.task.bytes for pending in self._pending)
        return len(self._pending) > MAX_OUTSTANDING or outstanding > MAX_OUTSTANDING_BYTES

    def _finish(self, index: int) -> None:
        pending = self._pending.pop(index)
        try:
            pending.finish(self._random)
        except Exception as error:
            raise self._make_error(pending.task.operation, error) from error

    def _regroup(self, chapter: int | None) -> None:
        """Finish all operations, leave the subgroups, and form those of a chapter."""
        while self._pending:
            self._finish(self._random.randrange(len(self._pending)))
        for group in self._groups[1:]:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        if chapter is not None:
            others = self._plan.groups(chapter)[1:]
            made = [dist.new_group(members, timeout=self._timeout) for members in others]
            self._groups = [dist.group.WORLD, *made]

    def _make_error(self, operation: Operation, error: Exception) -> SoakFailed:
        plan, number = self._plan, operation.number
        first = number - number % CHAPTER
        kinds = "" if plan.kinds == WEIGHTS.keys() else f"--kinds {','.join(sorted(plan.kinds))} "
        repeat = f'make soak ARGS="{kinds}--nproc-per-node {plan.ranks} --seed {plan.seed} --first'
        return SoakFailed(
            f"rank {self._rank}, operation {number} of seed {plan.seed}: {operation}\n"
            f"    {type(error).__name__}: {error}\n"
            f'repeat it alone:      {repeat} {number} --operations 1"\n'
            f'with its chapter:     {repeat} {first} --operations {number - first + 1}"'
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
        SoakFailed: An operation failed on this rank.
    """
    # Deprecated names, which every supported PyTorch has, and coalesced operations.
    warnings.filterwarnings("ignore", category=FutureWarning)
    return Soak(plan, timeout, report).run(first, count)
