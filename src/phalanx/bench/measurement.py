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
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from phalanx.bench import machine
from phalanx.bench.messages import PrepareCommand, StreamCommand, TurnCommand
from phalanx.bench.operations import OPERATIONS, STORAGE, Operation
from phalanx.bench.plan import Variant, format_size
from phalanx.bench.process_pool import ProcessPool, SystemLostError
from phalanx.bench.rank import COPY_METHODS
from phalanx.bench.results import Report, Result, Timing
from phalanx.bench.systems import UnavailableError, settings
from phalanx.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.bench.plan import Plan
    from phalanx.bench.table import Display

_MIN_ROUNDS, _MAX_ROUNDS = 5, 100
_TURN_SECONDS = 0.02
_MAX_OPERATIONS = 2000
_MAX_BUFFERS = 64
_POOL_BYTES = 96 * 2**20
# Size up to which every result is checked, since numpy is slow above it. The least size of a plan
# is always checked.
_CHECKED_BYTES = 2**22
_STREAM_SECONDS, _STREAM_REPEATS = 0.15, 3


@dataclass(frozen=True)
class _Case:
    """One operation with one dtype and size."""

    operation: Operation
    dtype: str
    size: int

    @property
    def itemsize(self) -> int:
        return STORAGE[self.dtype].itemsize

    @property
    def name(self) -> str:
        size = f" of {format_size(self.size)}" if self.operation.has_size else ""
        return f"{self.operation.name}{size}, {self.dtype}"


def measure(plan: Plan, display: Display) -> Report:
    """Carry out a plan; blocks for minutes.

    Args:
        plan: The measurements to make.
        display: Display that shows each result when it is complete.

    Returns:
        A report with all results. Its notes name systems that are not installed, that lack an
        operation or whose ranks die.

    Raises:
        LaunchError: The memory bandwidth can't be measured, or no system is left.
        UsageError: No socket can be created in the folder for temporary files.
    """
    report = _create_report(plan)
    report.bandwidth = _measure_bandwidth(plan)
    sections = [
        (OPERATIONS[name], dtype)
        for name in plan.operations
        for dtype in (plan.dtypes if OPERATIONS[name].has_size else plan.dtypes[:1])
    ]
    sizes = {True: list(plan.sizes), False: [0]}
    display.begin(report, sum(len(sizes[operation.has_size]) for operation, _ in sections))
    measurement = _Measurement(plan, report, display)
    try:
        measurement.start()
        for operation, dtype in sections:
            display.begin_section(operation.name, dtype, measurement.systems)
            for size in sizes[operation.has_size]:
                measurement.measure(_Case(operation, dtype, size))
    finally:
        measurement.close()
    return report


def buffer_count(size: int) -> int:
    """Return how many sets of buffers, of `size` bytes per rank each, to use in turn.

    Together they take about 96 MiB per rank to exceed the caches, but there are at most 64 sets.
    """
    if size >= _POOL_BYTES:
        return 1
    return max(2, min(_MAX_BUFFERS, _POOL_BYTES // max(size, 1)))


class _Measurement:
    """A running measurement: the remaining systems and the report so far."""

    def __init__(self, plan: Plan, report: Report, display: Display) -> None:
        self._plan, self._report, self._display = plan, report, display
        self._pools: dict[str, ProcessPool] = {}
        self._unsupported: set[tuple[str, str, str]] = set()

    @property
    def systems(self) -> list[str]:
        """Names of the remaining systems."""
        return list(self._pools)

    def start(self) -> None:
        """Start all systems, then wait until each is ready."""
        for name in self._plan.systems:
            try:
                self._pools[name] = ProcessPool(name, self._plan.ranks, self._plan.timeout)
            except UnavailableError as error:
                self._note(f"{name} is not available: {error}")
        for name, pool in list(self._pools.items()):
            self._display.begin_activity(f"starting {name}")
            try:
                pool.wait_until_ready()
            except SystemLostError as error:
                self._drop(name, f"can't be measured: {error}")
            else:
                self._report.versions[f"{name}, running"] = pool.version
        self._require_systems()

    def close(self) -> None:
        """End all systems."""
        for pool in self._pools.values():
            pool.close()

    def measure(self, case: _Case) -> None:
        """Measure a case and add its result to the report."""
        self._display.begin_activity(case.name)
        ranks, operation = self._plan.ranks, case.operation
        count = operation.element_count(case.size, case.itemsize, ranks)
        bytes_per_rank = [
            sum(operation.buffer_counts(rank, ranks, count)) * case.itemsize
            for rank in range(ranks)
        ]
        buffers = buffer_count(max(bytes_per_rank))
        needed, free = sum(bytes_per_rank) * buffers * len(self._pools), machine.available_memory()
        if 1.5 * needed > free:
            self._note(
                f"{case.name} is skipped: all systems together need "
                f"{1.5 * needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are available"
            )
            return
        prepare = PrepareCommand(
            operation.name, case.dtype, count, buffers, None, tuple(self._plan.algorithms)
        )
        seconds = self._run_rounds(case, prepare)
        traffic = operation.traffic(ranks, count) * case.itemsize
        result = Result(
            operation=operation.name,
            dtype=case.dtype,
            size=case.size,
            bytes=count * case.itemsize,
            traffic=traffic,
            cached=sum(bytes_per_rank) * buffers < 2 * machine.cache_bytes(),
            limit=traffic / self._report.limit if operation.has_size else None,
            timings={name: Timing.of(values) for name, values in seconds.items()},
        )
        self._report.results.append(result)
        self._display.add_result(result)
        self._require_systems()

    def _run_rounds(self, case: _Case, prepare: PrepareCommand) -> dict[str, list[float]]:
        operations: dict[Variant, int] = {}
        for name in list(self._pools):
            with self._dropping_if_lost(name):
                if self._prepare(name, case, prepare):
                    variants = self._plan.variants(name)
                    operations.update({each: self._calibrate(each, case) for each in variants})
        seconds: dict[Variant, list[float]] = {each: [] for each in operations}
        start, number = time.monotonic(), 0
        while not self._has_enough_rounds(number, time.monotonic() - start):
            first = number % max(1, len(operations))
            for each in [*operations, *operations][first : first + len(operations)]:
                with self._dropping_if_lost(each.system):
                    if each.system in self._pools:
                        seconds[each].append(self._time_turn(each, case, operations[each], number))
            number += 1
        remaining = {each: values for each, values in seconds.items() if each.system in self._pools}
        return {each.label: values for each, values in remaining.items()}

    def _has_enough_rounds(self, rounds: int, seconds: float) -> bool:
        if self._plan.rounds is not None:
            return rounds >= self._plan.rounds
        if rounds < _MIN_ROUNDS:
            return False
        return rounds >= _MAX_ROUNDS or seconds > self._plan.seconds

    def _prepare(self, name: str, case: _Case, prepare: PrepareCommand) -> bool:
        """Prepare a system, and check a result unless the size is too large.

        Returns:
            False if the system lacks the operation or its result is wrong.
        """
        key = (name, case.operation.name, case.dtype)
        if key in self._unsupported:
            return False
        is_smallest = case.size == min(self._plan.sizes)
        if case.operation.has_size and (is_smallest or case.size <= _CHECKED_BYTES):
            prepare = replace(prepare, seed=secrets.randbelow(2**31))
        replies = self._pools[name].execute(prepare, f"{case.name} (preparation)")
        for reply in replies:
            if reply.wrong:
                self._report.wrong.append(f"{name} returns a wrong {case.name}: {reply.wrong}")
                self._note(self._report.wrong[-1])
            elif reply.missing or reply.error:
                self._note(
                    f"{name} does not support {case.operation.name}, {case.dtype}: "
                    f"{reply.missing or reply.error}"
                )
            else:
                continue
            self._unsupported.add(key)
            return False
        return True

    def _calibrate(self, each: Variant, case: _Case) -> int:
        """Determine by trial how many operations fit into a turn."""
        operations = 1
        for _ in range(2):
            taken = self._time_turn(each, case, operations, 0) * case.operation.transfers
            operations = max(1, min(_MAX_OPERATIONS, int(_TURN_SECONDS / taken)))
        return operations

    def _time_turn(self, each: Variant, case: _Case, operations: int, number: int) -> float:
        turn = TurnCommand(1 + number % 2, operations, operations // 8, each.algorithm)
        activity = f"{each.algorithm}, {case.name}" if each.algorithm else case.name
        replies = self._pools[each.system].execute(turn, activity)
        for rank, reply in enumerate(replies):
            if reply.error:
                raise SystemLostError(f"rank {rank} failed in {activity}: {reply.error}")
        return max(reply.value for reply in replies)

    @contextlib.contextmanager
    def _dropping_if_lost(self, name: str) -> Iterator[None]:
        try:
            yield
        except SystemLostError as error:
            self._drop(name, f"is dropped: {error}")

    def _drop(self, name: str, reason: str) -> None:
        self._pools.pop(name).kill()
        self._note(f"{name} {reason}")

    def _note(self, text: str) -> None:
        self._report.notes.append(text)
        self._display.add_note(text)

    def _require_systems(self) -> None:
        if not self._pools:
            raise LaunchError("no system can be measured: " + "; ".join(self._report.notes))


def _measure_bandwidth(plan: Plan) -> dict[str, float]:
    """Measure the memory bandwidth in bytes per second by method, with the plan's rank count."""
    size = max(2**27, 4 * machine.cache_bytes())
    best = dict.fromkeys(COPY_METHODS, 0.0)
    size = min(size, machine.available_memory() // (4 * plan.ranks))
    with ProcessPool("memory", plan.ranks, plan.timeout) as pool:
        try:
            pool.wait_until_ready()
            for method in COPY_METHODS * _STREAM_REPEATS:
                start = time.monotonic() + 0.1
                command = StreamCommand(method, size, start, _STREAM_SECONDS)
                replies = pool.execute(command, "moving memory")
                best[method] = max(best[method], sum(reply.value for reply in replies))
        except SystemLostError as error:
            raise LaunchError(f"can't measure the memory bandwidth: {error}") from None
    return best


def _create_report(plan: Plan) -> Report:
    return Report(
        command=shlex.join(["phalanx", *sys.argv[1:]]),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine.machine(),
        versions=machine.versions(),
        settings={
            **vars(plan),
            "pool_bytes": _POOL_BYTES,
            "rounds_at_least": _MIN_ROUNDS,
            "systems": {name: settings(name, plan.ranks) for name in plan.systems},
        },
    )
