"""Summation of the gradients of duplicate rows, by the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx import _native
from phalanx.embedding.arguments import DTYPES, MODES

__all__ = ["Batch", "BatchAddresses", "Share", "sum_gradients"]

BatchAddresses = tuple[int, int, int, int, int, int, int]
"""The addresses of a batch and its gradients, as the core takes them.

In order: the address and the number of the rows (int64); the address of the bags' offsets (0: each
row is a bag) and their number; the number of the mode; the address of the weights, one for each row
(0: no weights); the address of the gradients of the bags.
"""


@dataclass(frozen=True)
class Batch:
    """A checked batch of bags of rows.

    Attributes:
        rows: The row indices of all bags, one bag after the other: 1-D, int64.
        offsets: The position in `rows` at which each bag begins; None: each row is a bag.
        mode: "sum", "mean" or "max".
        weights: A factor for each row, or None.
    """

    rows: Tensor
    offsets: Tensor | None = None
    mode: str = "sum"
    weights: Tensor | None = None

    def clone(self) -> Batch:
        """Return a copy for a later step, as the caller may reuse its tensors meanwhile."""
        offsets = None if self.offsets is None else self.offsets.clone()
        weights = None if self.weights is None else self.weights.clone()
        return Batch(self.rows.clone(), offsets, self.mode, weights)

    def addresses(self, gradients: Tensor) -> BatchAddresses:
        """Return the addresses, given the gradients of the bags: (bags, width), contiguous."""
        offsets, weights = self.offsets, self.weights
        return (
            self.rows.data_ptr(),
            len(self.rows),
            0 if offsets is None else offsets.data_ptr(),
            len(gradients),
            MODES[self.mode],
            0 if weights is None else weights.data_ptr(),
            gradients.data_ptr(),
        )


class Share(NamedTuple):
    """A share of the rows: those whose index modulo `modulus` is `remainder`."""

    remainder: int = 0
    modulus: int = 1


def sum_gradients(
    batches: Sequence[BatchAddresses],
    width: int,
    dtype: torch.dtype,
    divisor: float = 1.0,
    share: Share = Share(),  # noqa: B008 - it is immutable
) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each row over batches of mode "sum" or "mean", and divide the sums.

    Args:
        batches: The addresses of the batches.
        width: The number of elements of a row.
        dtype: The dtype of the gradients: float32 or float64.
        divisor: The divisor of the sums.
        share: The share of the rows to return.

    Returns:
        The row indices, each once, in ascending order, and their gradients, of shape (rows, width).
    """
    max_rows = sum(batch[1] for batch in batches)
    rows, sums = torch.empty(max_rows, dtype=torch.int64), torch.empty(max_rows, width, dtype=dtype)
    count = _native.coalesce_rows(
        batches, width, DTYPES[dtype], divisor, share, (rows.data_ptr(), sums.data_ptr())
    )
    return rows[:count], sums[:count]
