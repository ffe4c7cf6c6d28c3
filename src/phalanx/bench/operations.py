"""The operations that are measured: buffers, memory traffic, inputs and expected results.

The size of an operation is the size of the largest buffer of any rank: the output of an all_gather,
the input of a reduce_scatter, the output of the root of a gather. The part of each rank is 1/p of
it, for p ranks. (nccl-tests defines size in the same way.)

Inputs and expected results are in numpy, for ranks that do not import torch. Numpy has no bfloat16;
its 16 bits are stored as a uint16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Portion = Literal["all", "part", "none"]


@dataclass(frozen=True)
class Operation:
    """An operation; rank 0 is its root if it has one.

    Attributes:
        name: Name on the command line.
        reads: Portions that the root and every other rank read.
        writes: Portions that the root and every other rank write.
        is_in_place: Whether the output replaces the input.
        transfers: Number of one-way transfers in a call; results are for one of them.
        is_pair: Whether only ranks 0 and 1 take part, in both directions one after the other.
    """

    name: str
    reads: tuple[Portion, Portion]
    writes: tuple[Portion, Portion]
    is_in_place: bool = False
    transfers: int = 1
    is_pair: bool = False

    @property
    def has_size(self) -> bool:
        """True if the operation has data; a barrier has none."""
        return any(portion != "none" for portion in self.reads)

    @property
    def is_split(self) -> bool:
        """True if the part of a rank is 1/p of the size, for p ranks."""
        return "part" in (*self.reads, *self.writes) or self.name == "all_to_all"

    def element_count(self, size: int, itemsize: int, ranks: int) -> int:
        """Return the number of elements of the largest buffer.

        The size is rounded up to whole elements, and to equal parts for the ranks.

        Args:
            size: Requested size in bytes.
            itemsize: Size of an element in bytes.
            ranks: Number of ranks.
        """
        if not self.has_size:
            return 0
        share = ranks if self.is_split else 1
        return -(-size // (itemsize * share)) * share

    def read_count(self, rank: int, ranks: int, count: int) -> int:
        """Return how many elements a rank reads in an operation of `count` elements."""
        return self._count(self.reads, rank, ranks, count)

    def write_count(self, rank: int, ranks: int, count: int) -> int:
        """Return how many elements a rank writes in an operation of `count` elements."""
        return self._count(self.writes, rank, ranks, count)

    def buffer_counts(self, rank: int, ranks: int, count: int) -> tuple[int, int]:
        """Return the elements of a rank's input and output buffer; (0, n) if in place."""
        reads = self.read_count(rank, ranks, count)
        writes = self.write_count(rank, ranks, count)
        return (0, max(reads, writes)) if self.is_in_place else (reads, writes)

    def traffic(self, ranks: int, count: int) -> int:
        """Return the least number of elements that cross the memory bus, over all ranks, one way.

        No implementation can do with less than to read every input and write every output once.
        """
        moved = sum(
            self.read_count(rank, ranks, count) + self.write_count(rank, ranks, count)
            for rank in range(ranks)
        )
        return moved // self.transfers

    def _count(self, portions: tuple[Portion, Portion], rank: int, ranks: int, count: int) -> int:
        if self.is_pair and rank > 1:
            return 0
        portion = portions[0 if rank == 0 else 1]
        return {"all": count, "part": count // ranks, "none": 0}[portion]


_EVERY: tuple[Portion, Portion] = ("all", "all")
_PARTS: tuple[Portion, Portion] = ("part", "part")
_ROOT: tuple[Portion, Portion] = ("all", "none")
_OTHERS: tuple[Portion, Portion] = ("none", "all")
_NONE: tuple[Portion, Portion] = ("none", "none")

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", _EVERY, _EVERY, is_in_place=True),
        Operation("reduce", _EVERY, _ROOT, is_in_place=True),
        Operation("broadcast", _ROOT, _OTHERS, is_in_place=True),
        Operation("gather", _PARTS, _ROOT),
        Operation("scatter", _ROOT, _PARTS),
        Operation("all_gather", _PARTS, _EVERY),
        Operation("all_gather_into_tensor", _PARTS, _EVERY),
        Operation("reduce_scatter", _EVERY, _PARTS),
        Operation("all_to_all", _EVERY, _EVERY),
        Operation("send_recv", _EVERY, _EVERY, transfers=2, is_pair=True),
        Operation("isend_irecv", _EVERY, _EVERY),
        Operation("barrier", _NONE, _NONE),
    )
}
"""All operations by name, in the order of measurement."""

ALGORITHMS = (
    "ring_all_reduce_simple",
    "ring_all_reduce",
    "halving_doubling_all_reduce",
    "tree_all_reduce",
)
"""Names of the functions of `phalanx.parallel` that implement all_reduce."""

STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
}
"""The numpy dtypes that store the elements, by dtype name."""


def encode(values: NDArray[np.int64], dtype: str) -> NDArray[Any]:
    """Convert integers to `dtype`; exact up to 256 in every dtype except the 8-bit ones."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(STORAGE[dtype])


def decode(stored: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Convert the result of `encode` to float64."""
    if dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def make_input(seed: int, rank: int, ranks: int, count: int) -> NDArray[np.int64]:
    """Return a rank's input: random values 0, 1 and 2, so that sums are exact in every dtype.

    From 64 ranks on, a sum of twos would exceed 8 bits, so the values are 0 and 1.
    """
    largest = min(2, np.iinfo(np.int8).max // ranks)
    return np.random.default_rng((seed, rank)).integers(0, largest + 1, count)


def expected_output(
    operation: Operation, seed: int, rank: int, ranks: int, count: int
) -> NDArray[np.int64]:
    """Return the expected result of a rank, computed with numpy from the inputs of all ranks.

    Args:
        operation: The operation; reductions use SUM.
        seed: Seed of the inputs.
        rank: Rank of the result.
        ranks: Number of ranks.
        count: Number of elements of the operation.
    """
    inputs = [
        make_input(seed, other, ranks, operation.read_count(other, ranks, count))
        for other in range(ranks)
    ]
    part = slice(rank * count // ranks, (rank + 1) * count // ranks)
    result: NDArray[np.int64]
    match operation.name:
        case "all_reduce" | "reduce":
            result = np.sum(inputs, axis=0)
        case "reduce_scatter":
            result = np.sum(inputs, axis=0)[part]
        case "broadcast":
            result = inputs[0]
        case "scatter":
            result = inputs[0][part]
        case "all_to_all":
            result = np.concatenate([values[part] for values in inputs])
        case "send_recv":
            result = inputs[1 - rank] if rank < 2 else inputs[rank]
        case "isend_irecv":
            result = inputs[rank - 1]
        case _:
            result = np.concatenate(inputs)
    return result[: operation.write_count(rank, ranks, count)]
