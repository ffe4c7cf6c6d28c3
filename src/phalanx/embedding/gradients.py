"""Summation of the gradients of duplicate rows, by the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx import _native
from phalanx.embedding.arguments import DTYPES, MODES

__all__ = ["Addresses", "Batch", "Share", "added_up"]

Addresses = tuple[int, int, int, int, int, int, int]
"""The addresses of a batch and its gradients, as the core takes them.

In order: the address and the number of the rows (int64); the address (0: each row is a bag) and the
number of the bags' offsets; the mode's number; the address of the weights, one for each row (0: no
weights); the address of the gradients of the bags.
"""


@dataclass(frozen=True)
class Batch:
    """A checked batch of bags of rows.

    Attributes:
        rows: The row indices of all bags, one bag after the other: 1-D, int64.
        begins: The position in `rows` at which each bag begins; None: each row is a bag.
        mode: "sum", "mean" or "max".
        weights: A factor for each row, or None.
    """

    rows: Tensor
    begins: Tensor | None = None
    mode: str = "sum"
    weights: Tensor | None = None

    def kept(self) -> Batch:
        """Return a copy for a later step, as the caller may reuse its tensors meanwhile."""
        begins = None if self.begins is None else self.begins.clone()
        weights = None if self.weights is None else self.weights.clone()
        return Batch(self.rows.clone(), begins, self.mode, weights)

    def at(self, outputs: Tensor) -> Addresses:
        """Return the addresses, given the gradients of the bags: (bags, width), contiguous."""
        begins, weights = self.begins, self.weights
        return (
            self.rows.data_ptr(),
            len(self.rows),
            0 if begins is None else begins.data_ptr(),
            len(outputs),
            MODES[self.mode],
            0 if weights is None else weights.data_ptr(),
            outputs.data_ptr(),
        )


class Share(NamedTuple):
    """A share of the rows: those whose index modulo `shares` is `rest`."""

    rest: int = 0
    shares: int = 1


def added_up(
    batches: Sequence[Addresses],
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
    most = sum(batch[1] for batch in batches)
    rows, sums = torch.empty(most, dtype=torch.int64), torch.empty(most, width, dtype=dtype)
    count = _native.coalesce_rows(
        batches, width, DTYPES[dtype], divisor, share, (rows.data_ptr(), sums.data_ptr())
    )
    return rows[:count], sums[:count]
