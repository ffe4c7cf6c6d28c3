"""One operation on one rank: its buffers, the check of its result, and the clock.

The same code times every system: what differs is the `System` that it is given.
"""

from __future__ import annotations

import gc
import time
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from phalanx.bench.elements import decode, encode, expected, given
from phalanx.bench.operations import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from phalanx.bench.messages import Prepare, Turn

__all__ = ["System", "UnsupportedError", "Work"]

# A byte of which no element consists that `given` makes, so that an untouched output shows.
_POISON = 0xA5


class UnsupportedError(Exception):
    """The system doesn't have this operation for this dtype; the message says why."""


class System(Protocol):
    """What is measured, on one rank.

    Attributes:
        rank: This process's.
        ranks: How many there are.
        version: Of the library that does the work.
    """

    rank: int
    ranks: int
    version: str

    def empty(self, count: int, dtype: str) -> tuple[Any, NDArray[Any]]:
        """A buffer as the system wants it, and the same memory as a numpy array."""

    def bind(self, operation: str, source: Any, target: Any, dtype: str) -> Callable[[], object]:
        """A call that does an operation, or an algorithm, on these buffers; it blocks.

        `source` and `target` are the same buffer where an operation works in place.

        Raises:
            UnsupportedError: there is no such operation.
        """

    def barrier(self) -> object:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the system's group."""


class Work:
    """An operation that is ready to be timed, with its buffers."""

    def __init__(self, system: System, command: Prepare) -> None:
        """Allocate and bind; raises UnsupportedError."""
        self._system = system
        self._command = command
        self._operation = OPERATIONS[command.operation]
        self._views: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._native: list[Any] = []
        self._calls: dict[str, list[Callable[[], object]]] = {
            name: [] for name in ("", *command.algorithms)
        }
        for _ in range(command.buffers):
            self._add_buffers()

    def check(self, seed: int) -> str:
        """Run the operation once in each way and compare; returns what is wrong, or nothing."""
        # All of them: a rank that left out one would keep the others waiting.
        found = {algorithm: self._check(seed, algorithm) for algorithm in self._calls}
        words = [f"{name}: {wrong}" if name else wrong for name, wrong in found.items() if wrong]
        return "; ".join(words)

    def time(self, turn: Turn) -> float:
        """Rewrite the buffers, then time the calls: seconds of one operation, one way."""
        value = encode(np.array([turn.value]), self._command.dtype)
        for source, target in self._views:
            source[...] = value
            if target is not source:
                target[...] = value
        ways = self._calls[turn.algorithm]
        warm_ups = list(islice(cycle(ways), turn.warm_ups))
        calls = list(islice(cycle(ways), turn.operations))
        gc.disable()
        try:
            self._system.barrier()
            for call in warm_ups:
                call()
            self._system.barrier()
            start = time.perf_counter()
            for call in calls:
                call()
            taken = time.perf_counter() - start
        finally:
            gc.enable()
        return taken / turn.operations / self._operation.ways

    def _check(self, seed: int, algorithm: str) -> str:
        rank, ranks, count = self._system.rank, self._system.ranks, self._command.count
        dtype, (source, target) = self._command.dtype, self._views[0]
        target.view(np.uint8).fill(_POISON)
        reads = self._operation.reads_of(rank, ranks, count)
        source[:reads] = encode(given(seed, rank, reads), dtype)
        self._system.barrier()
        self._calls[algorithm][0]()
        wanted = expected(self._operation, seed, rank, ranks, count)
        got = decode(target[: wanted.size], dtype)
        wrong = np.flatnonzero(got != decode(encode(wanted, dtype), dtype))
        if not wrong.size:
            return ""
        first = int(wrong[0])
        return (
            f"{wrong.size} of {wanted.size} elements are wrong on rank {rank}, the first at "
            f"{first}: {got[first]:g} instead of {wanted[first]}"
        )

    def _add_buffers(self) -> None:
        """All ranks allocate the same, as memory that they share may ask for it."""
        system, dtype = self._system, self._command.dtype
        sizes = [
            self._operation.buffers_of(rank, system.ranks, self._command.count)
            for rank in range(system.ranks)
        ]
        target, target_view = system.empty(max(size[1] for size in sizes), dtype)
        source, source_view = target, target_view
        if not self._operation.in_place:
            source, source_view = system.empty(max(size[0] for size in sizes), dtype)
        # What this rank doesn't use is never touched, so it costs no memory.
        reads, writes = sizes[system.rank]
        views = (target_view[:writes], target_view[:writes])
        if not self._operation.in_place:
            views = (source_view[:reads], target_view[:writes])
        self._native.append((source, target))
        self._views.append(views)
        for algorithm, calls in self._calls.items():
            operation = algorithm or self._command.operation
            calls.append(system.bind(operation, source, target, dtype))
