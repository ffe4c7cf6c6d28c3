"""Dtypes in numpy, for ranks that do not import torch, and the expected results of operations.

Numpy has no bfloat16; its 16 bits are stored as a uint16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from phalanx.bench.operations import Operation

__all__ = ["STORAGE", "decode", "encode", "expected_output", "make_input"]

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


def make_input(seed: int, rank: int, count: int) -> NDArray[np.int64]:
    """Return a rank's input: random values 0, 1 and 2, so that sums are exact in every dtype."""
    return np.random.default_rng((seed, rank)).integers(0, 3, count)


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
    inputs = [make_input(seed, r, operation.read_count(r, ranks, count)) for r in range(ranks)]
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
