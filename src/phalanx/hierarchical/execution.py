"""Execution of one operation: its steps in memory and between hosts, and their overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from phalanx import _native
from phalanx.hierarchical.transfers import OperationTransfers, PostedTransfer, bytes_at, chunk_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from phalanx.topology import Layout
    from phalanx.transports import Transport

__all__ = [
    "CHUNK_BYTES",
    "Chunk",
    "Elements",
    "NativeFailure",
    "Operation",
    "Scratch",
    "Steps",
    "run_pipeline",
    "split_chunks",
]

Steps = Generator[list[PostedTransfer], None, None]
"""The steps of a chunk; yields the transfers that must complete before the next step."""

CHUNK_BYTES = 4 * 2**20
"""The bytes of one chunk of an operation, all ranks of a host together."""
_CHUNKS_IN_FLIGHT = 4
"""The number of chunks in flight, so that the network never waits for memory."""

_SUM = _native.REDUCE_OPS["sum"]
_AVG = _native.REDUCE_OPS["avg"]


class NativeFailure(Exception):  # noqa: N818 - ends an operation early; not yet an error
    """An operation of the native group has failed."""

    def __init__(self, status: _native.Status) -> None:
        super().__init__(status.code)
        self.status = status


class Scratch(int):
    """The address of memory that lives as long as this object."""

    _memory: torch.Tensor

    @classmethod
    def allocate(cls, size: int) -> Scratch:
        """Allocate `size` bytes, uninitialized."""
        memory = torch.empty(max(1, size), dtype=torch.uint8)
        address = cls(memory.data_ptr())
        address._memory = memory
        return address


class Elements(NamedTuple):
    """The element type and operator of an operation.

    `dtype` is a value of `_native.DTYPES`, `op` one of `_native.REDUCE_OPS`.
    """

    dtype: int
    bytes: int
    """Size of one element in bytes."""
    op: int = 0
    ranks: int = 1
    """World size of the group, the divisor of an average."""

    @property
    def partial_op(self) -> int:
        """The operator of all steps but the last."""
        return _SUM if self.op == _AVG else self.op

    def combine(self, output: int, sources: Sequence[int], count: int, *, last: bool) -> None:
        """Combine buffers of `count` elements in the order of `sources`.

        Args:
            output: The address of the result.
            sources: The addresses of the inputs.
            count: The number of elements of each buffer.
            last: Whether this is the last step, which divides an average.
        """
        op = self.op if last else self.partial_op
        _native.reduce(output, sources, count, self.dtype, op, float(self.ranks))


class Operation(OperationTransfers):
    """An operation composed of steps in memory and between hosts.

    Args:
        layout: The ranks of the group by host.
        native: The native group of this host.
        transport: The transport that carries bytes between hosts.
        deadline: The deadline, in seconds on the monotonic clock.
        create_failure_check: See `OperationTransfers`.
    """

    def __init__(
        self,
        layout: Layout,
        native: _native.Group,
        transport: Transport,
        deadline: float,
        create_failure_check: Callable[[], Callable[[], None]],
    ) -> None:
        super().__init__(native, transport, deadline, create_failure_check)
        self.layout = layout

    def run_local(self, name: str, *arguments: object, extra: float = 0.0) -> None:
        """Run an operation of this host's native group.

        Args:
            name: The name of the method of `_native.Group`.
            *arguments: Its arguments, except for the timeout.
            extra: Seconds by which the operation may exceed the deadline.

        Raises:
            NativeFailure: The operation has failed.
        """
        status = getattr(self._native, name)(*arguments, self.remaining + extra)
        if status is not None:
            raise NativeFailure(status)

    def post_send(self, address: int, size: int, peer: int, tag: int = 0) -> list[PostedTransfer]:
        """Post a send of memory to a rank; post nothing if the size is 0."""
        return [self.send(bytes_at(address, size), peer, tag)] if size else []

    def post_recv(self, address: int, size: int, peer: int, tag: int = 0) -> list[PostedTransfer]:
        """Post a receive into memory from a rank; post nothing if the size is 0."""
        return [self.recv(bytes_at(address, size), peer, tag)] if size else []


@dataclass(frozen=True)
class Chunk:
    """A part of an operation's elements."""

    begin: int
    count: int
    tag: int
    """The tag of the chunk's transfers, by which transfers of other chunks may overtake them."""


def split_chunks(count: int, max_count: int) -> Iterator[Chunk]:
    """Split `count` elements into chunks of at most `max_count`; yield one empty chunk for none."""
    max_count = max(1, max_count)
    for number in range(max(1, -(-count // max_count))):
        begin = number * max_count
        yield Chunk(begin, min(max_count, count - begin), chunk_tag(number))


def run_pipeline(operation: Operation, steps: Iterable[Steps]) -> None:
    """Run the steps of all chunks, several chunks at a time.

    Each round runs the next step of every chunk in flight, the oldest first. All ranks of a host
    therefore reach their steps in memory in the same order, regardless of the network.
    """
    source = iter(steps)
    active: deque[tuple[Steps, list[PostedTransfer]]] = deque()
    while True:
        if len(active) < _CHUNKS_IN_FLIGHT and (new := next(source, None)) is not None:
            active.append((new, []))
        if not active:
            return
        for _ in range(len(active)):
            step, transfers = active.popleft()
            operation.wait(*transfers)
            next_transfers = next(step, None)
            if next_transfers is not None:
                active.append((step, next_transfers))
