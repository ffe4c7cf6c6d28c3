"""The rounds of a measurement. The systems take turns; their order rotates from round to round.

In a system's turn, its ranks rewrite all their buffers, wait in a barrier, run some warm-up
operations, wait in a barrier again, and time as many operations as take about 20 ms, each with the
next buffers. The sets of buffers of a rank take 96 MiB together, to exceed the caches, but there
are at most 64 sets. The time of a turn is that of the slowest rank, divided by the number of
operations. There are at least 5 rounds, and more until 1.5 s have passed.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Protocol

from phalanx.bench import machine
from phalanx.bench.dtypes import STORAGE
from phalanx.bench.memory import METHODS
from phalanx.bench.messages import Prepare, Stream, Turn
from phalanx.bench.operations import OPERATIONS, Operation
from phalanx.bench.plan import Contender, label_of
from phalanx.bench.process_pool import LostError, ProcessSet
from phalanx.bench.results import Figure, Report, Timing
from phalanx.bench.systems import AbsentError, settings
from phalanx.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from phalanx.bench.plan import Plan

__all__ = ["Audience", "buffers_for", "measure"]

_ROUNDS_AT_LEAST, _ROUNDS_AT_MOST = 5, 100
_TURN_SECONDS = 0.02
_OPERATIONS_AT_MOST = 2000
_BUFFERS_AT_MOST = 64
_POOL_BYTES = 96 * 2**20
# Size up to which every result is checked, since numpy is slow above it. The least size of a plan
# is always checked.
_CHECKED_BYTES = 2**22
_STREAM_SECONDS, _STREAM_REPEATS = 0.15, 3


class Audience(Protocol):
    """A listener for the progress of a measurement."""

    def begin(self, report: Report, figures: int) -> None:
        """Handle the start of a measurement of `figures` figures."""

    def working(self, what: str) -> None:
        """Handle the start of an activity; `what` describes it."""

    def section(self, operation: str, dtype: str, systems: Sequence[str]) -> None:
        """Handle the start of the figures of an operation and a dtype, for `systems`."""

    def figure(self, figure: Figure) -> None:
        """Handle a new figure."""

    def note(self, text: str) -> None:
        """Handle a note about missing results, with the reason."""


@dataclass(frozen=True)
class _Cell:
    """One operation with one dtype and size."""

    operation: Operation
    dtype: str
    size: int

    @property
    def itemsize(self) -> int:
        return STORAGE[self.dtype].itemsize

    @property
    def name(self) -> str:
        size = f" of {label_of(self.size)}" if self.operation.has_size else ""
        return f"{self.operation.name}{size}, {self.dtype}"


def measure(plan: Plan, audience: Audience) -> Report:
    """Carry out a plan; blocks for minutes.

    Args:
        plan: The measurements to make.
        audience: Listener that receives each figure when it is complete.

    Returns:
        A report with all figures. Its notes name systems that are not installed, that lack an
        operation or whose ranks die.

    Raises:
        LaunchError: The memory bandwidth can't be measured, or no system is left.
        UsageError: No socket can be created in the folder for temporary files.
    """
    report = _report(plan)
    report.bandwidth = _bandwidth(plan)
    sections = [
        (OPERATIONS[name], dtype)
        for name in plan.operations
        for dtype in (plan.dtypes if OPERATIONS[name].has_size else plan.dtypes[:1])
    ]
    sizes = {True: list(plan.sizes), False: [0]}
    audience.begin(report, sum(len(sizes[operation.has_size]) for operation, _ in sections))
    run = _Run(plan, report, audience)
    try:
        run.start()
        for operation, dtype in sections:
            audience.section(operation.name, dtype, run.systems)
            for size in sizes[operation.has_size]:
                run.measure(_Cell(operation, dtype, size))
    finally:
        run.close()
    return report


def buffers_for(size: int) -> int:
    """Return how many sets of buffers, of `size` bytes per rank each, to use in turn.

    Together they take about 96 MiB per rank to exceed the caches, but there are at most 64 sets.
    """
    if size >= _POOL_BYTES:
        return 1
    return max(2, min(_BUFFERS_AT_MOST, _POOL_BYTES // max(size, 1)))


class _Run:
    """A running measurement: the remaining systems and the report so far."""

    def __init__(self, plan: Plan, report: Report, audience: Audience) -> None:
        self._plan, self._report, self._audience = plan, report, audience
        self._sets: dict[str, ProcessSet] = {}
        self._unsupported: set[tuple[str, str, str]] = set()

    @property
    def systems(self) -> list[str]:
        """Names of the remaining systems."""
        return list(self._sets)

    def start(self) -> None:
        """Start all systems, then wait until each is ready."""
        for name in self._plan.systems:
            try:
                self._sets[name] = ProcessSet(name, self._plan.ranks, self._plan.timeout)
            except AbsentError as error:
                self._note(f"{name} is absent: {error}")
        for name, processes in list(self._sets.items()):
            self._audience.working(f"starting {name}")
            try:
                processes.meet()
            except LostError as error:
                self._drop(name, f"can't be measured: {error}")
            else:
                self._report.versions[f"{name}, running"] = processes.version
        self._require_systems()

    def close(self) -> None:
        """End all systems."""
        for processes in self._sets.values():
            processes.close()

    def measure(self, cell: _Cell) -> None:
        """Add the figure of a cell to the report."""
        self._audience.working(cell.name)
        ranks, operation = self._plan.ranks, cell.operation
        count = operation.elements(cell.size, cell.itemsize, ranks)
        used = [
            sum(operation.buffers_of(rank, ranks, count)) * cell.itemsize for rank in range(ranks)
        ]
        buffers = buffers_for(max(used))
        needed, free = sum(used) * buffers * len(self._sets), machine.available_memory()
        if 1.5 * needed > free:
            self._note(
                f"{cell.name} is left out: all systems together need "
                f"{1.5 * needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are available"
            )
            return
        prepare = Prepare(
            operation.name, cell.dtype, count, buffers, None, tuple(self._plan.algorithms)
        )
        seconds = self._rounds(cell, prepare)
        traffic = operation.traffic(ranks, count) * cell.itemsize
        figure = Figure(
            operation=operation.name,
            dtype=cell.dtype,
            size=cell.size,
            bytes=count * cell.itemsize,
            traffic=traffic,
            cached=sum(used) * buffers < 2 * machine.cache_bytes(),
            limit=traffic / self._report.limit if operation.has_size else None,
            timings={name: Timing.of(values) for name, values in seconds.items()},
        )
        self._report.figures.append(figure)
        self._audience.figure(figure)
        self._require_systems()

    def _rounds(self, cell: _Cell, prepare: Prepare) -> dict[str, list[float]]:
        operations: dict[Contender, int] = {}
        for name in list(self._sets):
            with self._losing(name):
                if self._prepare(name, cell, prepare):
                    ways = self._plan.contenders_of(name)
                    operations.update({each: self._operations(each, cell) for each in ways})
        seconds: dict[Contender, list[float]] = {each: [] for each in operations}
        start, number = time.monotonic(), 0
        while not self._enough(number, time.monotonic() - start):
            first = number % max(1, len(operations))
            for each in [*operations, *operations][first : first + len(operations)]:
                with self._losing(each.system):
                    if each.system in self._sets:
                        seconds[each].append(self._turn(each, cell, operations[each], number))
            number += 1
        there = {each: values for each, values in seconds.items() if each.system in self._sets}
        return {each.label: values for each, values in there.items()}

    def _enough(self, rounds: int, seconds: float) -> bool:
        if self._plan.rounds is not None:
            return rounds >= self._plan.rounds
        if rounds < _ROUNDS_AT_LEAST:
            return False
        return rounds >= _ROUNDS_AT_MOST or seconds > self._plan.seconds

    def _prepare(self, name: str, cell: _Cell, prepare: Prepare) -> bool:
        """Prepare a system, and check a result unless the size is too large.

        Returns:
            False if the system lacks the operation or its result is wrong.
        """
        key = (name, cell.operation.name, cell.dtype)
        if key in self._unsupported:
            return False
        least = cell.size == min(self._plan.sizes)
        if cell.operation.has_size and (least or cell.size <= _CHECKED_BYTES):
            prepare = Prepare(**{**vars(prepare), "seed": secrets.randbelow(2**31)})
        replies = self._sets[name].ask(prepare, f"{cell.name} (getting ready)")
        for reply in replies:
            if reply.wrong:
                self._report.wrong.append(f"{name} gives a wrong {cell.name}: {reply.wrong}")
                self._note(self._report.wrong[-1])
            elif reply.missing or reply.error:
                self._note(
                    f"{name} lacks {cell.operation.name}, {cell.dtype}: "
                    f"{reply.missing or reply.error}"
                )
            else:
                continue
            self._unsupported.add(key)
            return False
        return True

    def _operations(self, each: Contender, cell: _Cell) -> int:
        """Determine by trial how many operations fit into a turn."""
        operations = 1
        for _ in range(2):
            taken = self._turn(each, cell, operations, 0) * cell.operation.ways
            operations = max(1, min(_OPERATIONS_AT_MOST, int(_TURN_SECONDS / taken)))
        return operations

    def _turn(self, each: Contender, cell: _Cell, operations: int, number: int) -> float:
        turn = Turn(1 + number % 2, operations, operations // 8, each.algorithm)
        doing = f"{each.algorithm}, {cell.name}" if each.algorithm else cell.name
        replies = self._sets[each.system].ask(turn, doing)
        for rank, reply in enumerate(replies):
            if reply.error:
                raise LostError(f"rank {rank} failed in {doing}: {reply.error}")
        return max(reply.value for reply in replies)

    @contextlib.contextmanager
    def _losing(self, name: str) -> Iterator[None]:
        try:
            yield
        except LostError as error:
            self._drop(name, f"is dropped: {error}")

    def _drop(self, name: str, why: str) -> None:
        self._sets.pop(name).kill()
        self._note(f"{name} {why}")

    def _note(self, text: str) -> None:
        self._report.notes.append(text)
        self._audience.note(text)

    def _require_systems(self) -> None:
        if not self._sets:
            raise LaunchError("no system is left to measure: " + "; ".join(self._report.notes))


def _bandwidth(plan: Plan) -> dict[str, float]:
    """Measure the memory bandwidth in bytes per second by method, with the plan's rank count."""
    size = max(2**27, 4 * machine.cache_bytes())
    best = dict.fromkeys(METHODS, 0.0)
    size = min(size, machine.available_memory() // (4 * plan.ranks))
    with ProcessSet("memory", plan.ranks, plan.timeout) as processes:
        try:
            processes.meet()
            for method in METHODS * _STREAM_REPEATS:
                start = time.monotonic() + 0.1
                command = Stream(method, size, start, _STREAM_SECONDS)
                replies = processes.ask(command, "moving memory")
                best[method] = max(best[method], sum(reply.value for reply in replies))
        except LostError as error:
            raise LaunchError(f"the memory's speed can't be measured: {error}") from None
    return best


def _report(plan: Plan) -> Report:
    return Report(
        command=shlex.join(["phalanx", *sys.argv[1:]]),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine.machine(),
        versions=machine.versions(),
        settings={
            **vars(plan),
            "pool_bytes": _POOL_BYTES,
            "rounds_at_least": _ROUNDS_AT_LEAST,
            "systems": {name: settings(name, plan.ranks) for name in plan.systems},
        },
    )
