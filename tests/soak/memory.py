"""Tensors of the soak test: values that every rank can compute, in memory with guard bytes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

import phalanx
from tests.conformance import cases
from tests.soak.plan import LARGEST

# The largest slice, plus room for different starts.
_BYTES = LARGEST + 2**20
_POISON = 0xA5


class Pool:
    """Random values of every dtype, of which the inputs of operations are slices.

    All ranks have the same pool, so each knows every rank's inputs at the cost of a view.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[str, Tensor] = {}

    def slice(self, dtype: str, count: int, *key: int) -> Tensor:
        """Return `count` read-only elements; `key` selects the part of the pool."""
        pool = self._pool(dtype)
        mixed = 0
        for number in key:
            mixed = (mixed ^ (number + 1)) * 0x9E3779B97F4A7C15 % 2**64
            mixed ^= mixed >> 29
        start = mixed % (len(pool) - count)
        return pool[start : start + count]

    def _pool(self, dtype: str) -> Tensor:
        if dtype not in self._pools:
            self._pools[dtype] = self._create(dtype)
        return self._pools[dtype]

    def _create(self, dtype: str) -> Tensor:
        kind = cases.DTYPES[dtype]
        random = torch.Generator().manual_seed(self._seed)
        if dtype in cases.COMPLEX:
            return self._pool("float32" if dtype == "complex64" else "float64").view(kind)
        if dtype in cases.FLOATS:
            count = _BYTES // kind.itemsize
            if cases.has_several_hosts():
                whole = torch.randint(1, 3, (count,), generator=random).to(kind)
                return whole * (torch.randint(0, 2, (count,), generator=random) * 2 - 1).to(kind)
            normal = torch.randn(count, generator=random).to(kind)
            return normal.where(normal != 0, 1.0)  # the minimum of 0 and -0 is ambiguous
        if dtype == "uint8":
            return torch.randint(0, 256, (_BYTES,), dtype=kind, generator=random)
        shared = self._pool("uint8")
        return shared & 1 == 1 if dtype == "bool" else shared.view(kind)


class Block:
    """A tensor for an operation, in shared memory or not, contiguous or not, between guard bytes.

    Args:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        random: Random generator for the layout.
        values: Initial values; poison if None.
        shared: Probability that the tensor is in shared memory.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        random: Random,
        values: Tensor | None,
        shared: float,
    ) -> None:
        is_contiguous = random.random() < 0.7
        gap = 1 if is_contiguous else random.randint(1, 3)
        order = list(range(len(shape)))
        if not is_contiguous:
            random.shuffle(order)
        strides, step = [0] * len(shape), gap
        for dimension in order[::-1]:
            strides[dimension] = step
            step *= max(1, shape[dimension])
        self._before = random.randrange(4)
        self._bytes = (self._before + step + 3) * dtype.itemsize
        self._dtype, self._shape, self._strides = dtype, shape, strides
        make = phalanx.empty_shared if random.random() < shared else torch.empty
        self._base, self.tensor = self._create_image(values, make)

    def check(self, expected: Tensor, name: str) -> None:
        """Compare all bits with `expected`, and the surrounding memory with poison."""
        image, view = self._create_image(expected, torch.empty)
        if not torch.equal(image, self._base):
            cases.check_bits(self.tensor, view, name)
            raise AssertionError(f"{name}: memory outside the tensor was written")

    def _create_image(
        self, values: Tensor | None, make: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor]:
        base = make(self._bytes, dtype=torch.uint8).fill_(_POISON)
        view = base.view(self._dtype).as_strided(self._shape, self._strides, self._before)
        if values is not None:
            view.copy_(values.view(self._shape))
        return base, view

    @property
    def size(self) -> int:
        """The size of the block in bytes."""
        return self._bytes


def premul_factor(rank: int) -> float:
    """Return the factor of a rank in a PREMUL_SUM: a power of two, so products are exact."""
    return 2.0 ** (rank % 4 - 1)


def reduce_exactly(reduction: str, inputs: list[Tensor]) -> Tensor:
    """Return the exact result of a reduction, in rank order as Phalanx guarantees."""
    if reduction == "PREMUL_SUM":
        inputs = [tensor * premul_factor(rank) for rank, tensor in enumerate(inputs)]
        reduction = "SUM"
    return cases.folded(reduction, inputs)
