"""An operation on one rank: its buffers, the check of its result, and its timing.

The same code times every system; only the `System` differs.
"""

from __future__ import annotations

import gc
import time
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from phalanx.bench.operations import OPERATIONS, decode, encode, expected_output, make_input

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from phalanx.bench.messages import PrepareCommand, TurnCommand

# A byte that occurs in no element that `make_input` returns, so that unwritten output is detected.
_POISON = 0xA5


class UnsupportedError(Exception):
    """The system lacks this operation for this dtype; the message says why."""


class System(Protocol):
    """A measured system, on one rank.

    Attributes:
        rank: Rank of this process.
        ranks: Number of ranks.
        version: Name and version of the measured library.
    """

    rank: int
    ranks: int
    version: str

    def empty(self, count: int, dtype: str) -> tuple[Any, NDArray[Any]]:
        """Allocate a buffer; return it in the system's form and as a numpy array."""

    def bind(self, operation: str, source: Any, target: Any, dtype: str) -> Callable[[], object]:
        """Return a blocking call of an operation or an algorithm on these buffers.

        `source` and `target` are the same buffer if the operation works in place.

        Raises:
            UnsupportedError: The system lacks the operation.
        """

    def barrier(self) -> object:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the system's group."""


class TimedOperation:
    """A prepared operation with its buffers, ready to be timed."""

    def __init__(self, system: System, command: PrepareCommand) -> None:
        """Allocate the buffers and bind the operation.

        Raises:
            UnsupportedError: The system lacks the operation.
        """
        self._system = system
        self._command = command
        self._operation = OPERATIONS[command.operation]
        self._views: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._calls: dict[str, list[Callable[[], object]]] = {
            name: [] for name in ("", *command.algorithms)
        }
        for _ in range(command.buffers):
            self._add_buffers()

    def check(self, seed: int) -> str:
        """Run the operation once with each algorithm; describe wrong results, or return ""."""
        # No early exit: the other ranks would wait for a rank that skips an algorithm.
        found = {algorithm: self._check_algorithm(seed, algorithm) for algorithm in self._calls}
        descriptions = [
            f"{name}: {wrong}" if name else wrong for name, wrong in found.items() if wrong
        ]
        return "; ".join(descriptions)

    def time(self, turn: TurnCommand) -> float:
        """Rewrite the buffers, time the calls and return the seconds of one operation, one way."""
        value = encode(np.array([turn.value]), self._command.dtype)
        for source, target in self._views:
            source[...] = value
            if target is not source:
                target[...] = value
        bound_calls = self._calls[turn.algorithm]
        warm_ups = list(islice(cycle(bound_calls), turn.warm_ups))
        calls = list(islice(cycle(bound_calls), turn.operations))
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
        return taken / turn.operations / self._operation.transfers

    def _check_algorithm(self, seed: int, algorithm: str) -> str:
        rank, ranks, count = self._system.rank, self._system.ranks, self._command.count
        dtype, (source, target) = self._command.dtype, self._views[0]
        target.view(np.uint8).fill(_POISON)
        reads = self._operation.read_count(rank, ranks, count)
        source[:reads] = encode(make_input(seed, rank, ranks, reads), dtype)
        self._system.barrier()
        self._calls[algorithm][0]()
        expected = expected_output(self._operation, seed, rank, ranks, count)
        actual = decode(target[: expected.size], dtype)
        wrong = np.flatnonzero(actual != decode(encode(expected, dtype), dtype))
        if not wrong.size:
            return ""
        first = int(wrong[0])
        return (
            f"{wrong.size} of {expected.size} elements are wrong on rank {rank}, the first at "
            f"{first}: {actual[first]:g} instead of {expected[first]}"
        )

    def _add_buffers(self) -> None:
        """Add a set of buffers, of the same size on all ranks as shared memory may require."""
        system, dtype = self._system, self._command.dtype
        sizes = [
            self._operation.buffer_counts(rank, system.ranks, self._command.count)
            for rank in range(system.ranks)
        ]
        target, target_view = system.empty(max(size[1] for size in sizes), dtype)
        source, source_view = target, target_view
        if not self._operation.is_in_place:
            source, source_view = system.empty(max(size[0] for size in sizes), dtype)
        # The rest of the buffers is never touched, so it takes no memory.
        reads, writes = sizes[system.rank]
        views = (target_view[:writes], target_view[:writes])
        if not self._operation.is_in_place:
            views = (source_view[:reads], target_view[:writes])
        self._views.append(views)
        for algorithm, calls in self._calls.items():
            operation = algorithm or self._command.operation
            calls.append(system.bind(operation, source, target, dtype))


def ping_pong(
    rank: int, send: Callable[[], object], recv: Callable[[], object]
) -> Callable[[], object]:
    """Return the part of a rank in a ping-pong between ranks 0 and 1; other ranks do nothing."""

    def ping() -> None:
        send()
        recv()

    def pong() -> None:
        recv()
        send()

    def do_nothing() -> None:
        pass

    return (ping, pong)[rank] if rank < 2 else do_nothing
