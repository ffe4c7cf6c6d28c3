"""Execution of one operation: its steps in memory and between hosts, and their overlap."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from phalanx import _native
from phalanx.hierarchical import tags
from phalanx.hierarchical.transfers import Links, Posted, bytes_at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from phalanx.topology import Layout
    from phalanx.transports import Transport

__all__ = ["CHUNK_BYTES", "Chunk", "Elements", "Refused", "Run", "Scratch", "chunks", "pipelined"]

CHUNK_BYTES = 4 * 2**20
"""Bytes of one chunk of an operation, all ranks of a host together."""
_WINDOW = 4
"""Number of chunks in flight, so that the network never waits for memory."""

_SUM = _native.REDUCE_OPS["sum"]
_AVG = _native.REDUCE_OPS["avg"]


class Refused(Exception):  # noqa: N818 - ends an operation early; not yet an error
    """A step in memory has failed."""

    def __init__(self, status: _native.Status) -> None:
        super().__init__(status.code)
        self.status = status


class Scratch(int):
    """The address of memory that lives as long as this object."""

    _memory: torch.Tensor

    @classmethod
    def of(cls, size: int) -> Scratch:
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
    def partial(self) -> int:
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
        op = self.op if last else self.partial
        _native.reduce(output, sources, count, self.dtype, op, float(self.ranks))


class Run(Links):
    """An operation composed of steps in memory and between hosts.

    Args:
        layout: The ranks of the group by host.
        native: The native group of this host.
        transport: The transport that carries bytes between hosts.
        deadline: The deadline, in seconds on the monotonic clock.
        looking: See `Links`.
    """

    def __init__(
        self,
        layout: Layout,
        native: _native.Group,
        transport: Transport,
        deadline: float,
        looking: Callable[[], Callable[[], None]],
    ) -> None:
        super().__init__(native, transport, deadline, looking)
        self.layout = layout

    def local(self, name: str, *arguments: object, extra: float = 0.0) -> None:
        """Run an operation of this host's native group.

        Args:
            name: The name of the method of `_native.Group`.
            *arguments: Its arguments, except for the timeout.
            extra: Seconds by which the operation may exceed the deadline.

        Raises:
            Refused: The operation has failed.
        """
        status = getattr(self._native, name)(*arguments, self.remaining + extra)
        if status is not None:
            raise Refused(status)

    def give(self, address: int, size: int, peer: int, tag: int = 0) -> list[Posted]:
        """Post a send of memory to a rank; post nothing if the size is 0."""
        return [self.send(bytes_at(address, size), peer, tag)] if size else []

    def take(self, address: int, size: int, peer: int, tag: int = 0) -> list[Posted]:
        """Post a receive into memory from a rank; post nothing if the size is 0."""
        return [self.recv(bytes_at(address, size), peer, tag)] if size else []


@dataclass(frozen=True)
class Chunk:
    """A part of an operation's elements."""

    begin: int
    count: int
    tag: int
    """Tag of the chunk's transfers, so that those of other chunks may overtake them."""


def chunks(count: int, most: int) -> Iterator[Chunk]:
    """Split `count` elements into chunks of at most `most`; yield one empty chunk for none."""
    most = max(1, most)
    for number in range(max(1, -(-count // most))):
        begin = number * most
        yield Chunk(begin, min(most, count - begin), tags.of_chunk(number))


def pipelined(run: Run, steps: Iterable[Generator[list[Posted], None, None]]) -> None:
    """Run the steps of all chunks, several chunks at a time.

    The steps of a chunk are a generator that yields the transfers that must end before it resumes.

    Each round runs the next step of every chunk in flight, the oldest first. All ranks of a host
    therefore reach their steps in memory in the same order, regardless of the network.
    """
    source = iter(steps)
    active: deque[tuple[Generator[list[Posted], None, None], list[Posted]]] = deque()
    while True:
        if len(active) < _WINDOW and (new := next(source, None)) is not None:
            active.append((new, []))
        if not active:
            return
        for _ in range(len(active)):
            step, awaited = active.popleft()
            run.wait(*awaited)
            following = next(step, None)
            if following is not None:
                active.append((step, following))
