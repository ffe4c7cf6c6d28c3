"""One operation under way: its steps in memory and between hosts, and how they overlap."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from phalanx import _native
from phalanx.hosts import tags
from phalanx.hosts.links import Links, Posted, bytes_at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from phalanx.engines import Engine
    from phalanx.topology import Layout

__all__ = ["CHUNK_BYTES", "Chunk", "Elements", "Refused", "Run", "Scratch", "chunks", "pipelined"]

CHUNK_BYTES = 4 * 2**20
"""What moves at once, of all ranks of a host together."""
_WINDOW = 4
"""So many chunks are under way at once, so that the network never waits for memory."""

_SUM = _native.REDUCE_OPS["sum"]
_AVG = _native.REDUCE_OPS["avg"]


class Refused(Exception):  # noqa: N818 - not an error yet: what ends an operation early
    """A step in memory has failed."""

    def __init__(self, status: _native.Status) -> None:
        super().__init__(status.code)
        self.status = status


class Scratch(int):
    """The address of memory that lives as long as this object."""

    _memory: torch.Tensor

    @classmethod
    def of(cls, size: int) -> Scratch:
        """So many bytes, not cleared."""
        memory = torch.empty(max(1, size), dtype=torch.uint8)
        address = cls(memory.data_ptr())
        address._memory = memory
        return address


class Elements(NamedTuple):
    """What an operation is about: numbers of `_native.DTYPES` and `REDUCE_OPS`, and sizes."""

    dtype: int
    bytes: int
    """Of one element."""
    op: int = 0
    ranks: int = 1
    """World size of the group: what an average is divided by."""

    @property
    def partial(self) -> int:
        """The operator of all steps but the last."""
        return _SUM if self.op == _AVG else self.op

    def combine(self, output: int, sources: Sequence[int], count: int, *, last: bool) -> None:
        """Combine buffers in this order; an average is divided in the last step."""
        op = self.op if last else self.partial
        _native.reduce(output, sources, count, self.dtype, op, float(self.ranks))


class Run(Links):
    """An operation that is composed of steps.

    Args:
        layout: Who is on which host.
        native: The group of this host.
        engine: What carries bytes between hosts.
        deadline: In monotonic seconds.
        looking: As for `Links`.
    """

    def __init__(
        self,
        layout: Layout,
        native: _native.Group,
        engine: Engine,
        deadline: float,
        looking: Callable[[], Callable[[], None]],
    ) -> None:
        super().__init__(native, engine, deadline, looking)
        self.layout = layout

    def local(self, name: str, *arguments: object, extra: float = 0.0) -> None:
        """Do an operation in the memory of this host, with so many seconds beyond the deadline."""
        status = getattr(self._native, name)(*arguments, self.remaining + extra)
        if status is not None:
            raise Refused(status)

    def give(self, address: int, size: int, peer: int, tag: int = 0) -> list[Posted]:
        """Post a send of memory to a rank; nothing to send is nothing to post."""
        return [self.send(bytes_at(address, size), peer, tag)] if size else []

    def take(self, address: int, size: int, peer: int, tag: int = 0) -> list[Posted]:
        """Post a receive into memory from a rank."""
        return [self.recv(bytes_at(address, size), peer, tag)] if size else []


@dataclass(frozen=True)
class Chunk:
    """A part of an operation's elements."""

    begin: int
    count: int
    tag: int
    """Of its transfers: those of other chunks may overtake it."""


def chunks(count: int, most: int) -> Iterator[Chunk]:
    """Elements in parts of `most`; one empty part if there are none."""
    most = max(1, most)
    for number in range(max(1, -(-count // most))):
        begin = number * most
        yield Chunk(begin, min(most, count - begin), tags.of_chunk(number))


def pipelined(run: Run, steps: Iterable[Generator[list[Posted], None, None]]) -> None:
    """Go through the steps of all chunks, some chunks at a time.

    Steps are generators that yield what must have ended before they go on.

    Each round takes the next step of every chunk that is under way, the oldest first. So all ranks
    of a host come to their steps in memory in the same order, whatever the network does.
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
