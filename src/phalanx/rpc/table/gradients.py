"""Gradients of rows, put together: each row once, in ascending order, by the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx import _native
from phalanx.rpc.table.arguments import DTYPES, MODES

__all__ = ["Addresses", "Batch", "Share", "added_up"]

Addresses = tuple[int, int, int, int, int, int, int]
"""Of a batch and its gradients, as the core takes them.

Address of its rows (int64), and how many there are; address of the offsets of its bags (0: each row
is one), and how many; the mode's number; addresses of a weight for each row (0: none), and of the
gradients of the bags.
"""


@dataclass(frozen=True)
class Batch:
    """Rows to be combined bag by bag, checked.

    Attributes:
        rows: Of all bags, one after the other: int64, flat.
        begins: Where each bag begins; None: each row is one.
        mode: "sum", "mean" or "max".
        weights: A factor for each row, or None.
    """

    rows: Tensor
    begins: Tensor | None = None
    mode: str = "sum"
    weights: Tensor | None = None

    def kept(self) -> Batch:
        """A copy, for a later step: who gave the tensors may use them again meanwhile."""
        begins = None if self.begins is None else self.begins.clone()
        weights = None if self.weights is None else self.weights.clone()
        return Batch(self.rows.clone(), begins, self.mode, weights)

    def at(self, outputs: Tensor) -> Addresses:
        """Where it is, with the gradients of its bags, [bags, width], contiguous."""
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
    """Which rows one of several is to update: those that leave `rest`, divided by `shares`."""

    rest: int = 0
    shares: int = 1


def added_up(
    batches: Sequence[Addresses],
    width: int,
    dtype: torch.dtype,
    divisor: float = 1.0,
    share: Share = Share(),  # noqa: B008 - it never changes
) -> tuple[Tensor, Tensor]:
    """Add up the gradients of the rows of batches of mode "sum" or "mean", and divide the sums.

    Args:
        batches: Where they are.
        width: Elements of a row.
        dtype: Of the gradients: float32 or float64.
        divisor: By what sums are divided.
        share: Which rows are wanted.

    Returns:
        Rows in ascending order, and their gradients, [rows, width].
    """
    most = sum(batch[1] for batch in batches)
    rows, sums = torch.empty(most, dtype=torch.int64), torch.empty(most, width, dtype=dtype)
    count = _native.add_up_rows(
        batches, width, DTYPES[dtype], divisor, share, (rows.data_ptr(), sums.data_ptr())
    )
    return rows[:count], sums[:count]
