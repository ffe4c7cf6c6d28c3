"""The operations that are measured: the buffers of each rank, and the least memory traffic.

The size of an operation is that of the largest buffer that a rank has in it: an all_gather's
output, a reduce_scatter's input, the output of a gather's root. Every rank's part of it is a p-th,
with p the number of ranks. (It is what nccl-tests calls size.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ALGORITHMS", "OPERATIONS", "Operation"]

Portion = Literal["all", "part", "none"]


@dataclass(frozen=True)
class Operation:
    """One operation; rank 0 is the root of those that have one.

    Attributes:
        name: As on the command line.
        reads: What the root and what every other rank reads.
        writes: What the root and what every other rank writes.
        in_place: The output takes the input's place.
        ways: How often the data goes there and back in one call; figures are for one way.
        pair: Only ranks 0 and 1 take part, in both directions one after the other.
    """

    name: str
    reads: tuple[Portion, Portion]
    writes: tuple[Portion, Portion]
    in_place: bool = False
    ways: int = 1
    pair: bool = False

    @property
    def has_size(self) -> bool:
        """Whether there is data at all; a barrier has none."""
        return any(portion != "none" for portion in self.reads)

    @property
    def is_split(self) -> bool:
        """Whether a rank's part is a p-th of the size."""
        return "part" in (*self.reads, *self.writes) or self.name == "all_to_all"

    def elements(self, size: int, itemsize: int, ranks: int) -> int:
        """How many elements the largest buffer has: whole ones, and as many for every rank.

        Args:
            size: bytes that were asked for.
            itemsize: bytes of an element.
            ranks: the number of ranks.
        """
        if not self.has_size:
            return 0
        share = ranks if self.is_split else 1
        return -(-size // (itemsize * share)) * share

    def reads_of(self, rank: int, ranks: int, count: int) -> int:
        """How many elements this rank gives, of an operation of `count` elements."""
        return self._count(self.reads, rank, ranks, count)

    def writes_of(self, rank: int, ranks: int, count: int) -> int:
        """How many elements this rank gets."""
        return self._count(self.writes, rank, ranks, count)

    def buffers_of(self, rank: int, ranks: int, count: int) -> tuple[int, int]:
        """Elements of the buffer that is read and of the one that is written; one if in place."""
        reads, writes = (
            self.reads_of(rank, ranks, count),
            self.writes_of(rank, ranks, count),
        )
        return (0, max(reads, writes)) if self.in_place else (reads, writes)

    def traffic(self, ranks: int, count: int) -> int:
        """The elements that have to cross the memory bus, over all ranks, for one way.

        Every input is read once and every output written once: nobody can do with less.
        """
        moved = sum(
            self.reads_of(rank, ranks, count) + self.writes_of(rank, ranks, count)
            for rank in range(ranks)
        )
        return moved // self.ways

    def _count(self, portions: tuple[Portion, Portion], rank: int, ranks: int, count: int) -> int:
        if self.pair and rank > 1:
            return 0
        portion = portions[0 if rank == 0 else 1]
        return {"all": count, "part": count // ranks, "none": 0}[portion]


_EVERY: tuple[Portion, Portion] = ("all", "all")
_PARTS: tuple[Portion, Portion] = ("part", "part")
_ROOT: tuple[Portion, Portion] = ("all", "none")
_OTHERS: tuple[Portion, Portion] = ("none", "all")
_NOBODY: tuple[Portion, Portion] = ("none", "none")

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", _EVERY, _EVERY, in_place=True),
        Operation("reduce", _EVERY, _ROOT, in_place=True),
        Operation("broadcast", _ROOT, _OTHERS, in_place=True),
        Operation("gather", _PARTS, _ROOT),
        Operation("scatter", _ROOT, _PARTS),
        Operation("all_gather", _PARTS, _EVERY),
        Operation("all_gather_into_tensor", _PARTS, _EVERY),
        Operation("reduce_scatter", _EVERY, _PARTS),
        Operation("all_to_all", _EVERY, _EVERY),
        Operation("send_recv", _EVERY, _EVERY, ways=2, pair=True),
        Operation("isend_irecv", _EVERY, _EVERY),
        Operation("barrier", _NOBODY, _NOBODY),
    )
}
"""By name, in the order in which they are measured."""

ALGORITHMS = (
    "ring_all_reduce_simple",
    "ring_all_reduce",
    "halving_doubling_all_reduce",
    "tree_all_reduce",
)
"""Functions of `phalanx.parallel` that do what the operation all_reduce does."""
