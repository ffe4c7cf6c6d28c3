"""Batches of bags of rows: the checks of their arguments, and the summation of gradients by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx import _native
from phalanx.errors import UsageError

DTYPES = {
    torch.float32: _native.DTYPES["float32"],
    torch.float64: _native.DTYPES["float64"],
}
MODES = {"sum": 0, "mean": 1, "max": 2}

BatchAddresses = tuple[int, int, int, int, int, int, int]
"""The addresses of a batch and its gradients, as the core takes them.

In order: the address and the number of the rows (int64); the address of the bags' offsets (0: each
row is a bag) and their number; the number of the mode; the address of the weights, one for each row
(0: no weights); the address of the gradients of the bags.
"""

Share = tuple[int, int]
"""A share of the rows: those whose index modulo the second number is the first one."""
WHOLE: Share = (0, 1)


def index_error(name: str, index: int, rows: int) -> UsageError:
    """Return the error for an out-of-range index."""
    return UsageError(
        f"table {name!r}: index {index} is out of range, expected 0 to {rows - 1} (the table has "
        f"{rows} rows); nothing was read or updated"
    )


def is_strided_cpu(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and on the CPU."""
    return tensor.is_cpu and tensor.layout == torch.strided


def describe(tensor: Tensor) -> str:
    """Describe a tensor's dtype, device and layout for error messages."""
    layout = "" if tensor.layout == torch.strided else f", layout {tensor.layout}"
    return f"{tensor.dtype} on {tensor.device}{layout}"


def prepare_indices(name: str, indices: Tensor, argument: str = "indices") -> Tensor:
    """Check indices and return them as the core takes them: 1-D, contiguous and int64."""
    if indices.dtype not in {torch.int64, torch.int32} or not is_strided_cpu(indices):
        raise UsageError(
            f"table {name!r}: {argument} of {describe(indices)} given, expected int64 or int32 on "
            "the CPU"
        )
    if indices.dim() == 1 and indices.dtype == torch.int64 and indices.is_contiguous():
        return indices  # the usual case: each operation below costs a microsecond
    return indices.detach().to(torch.int64).contiguous().view(-1)


def prepare_offsets(
    name: str, indices: Tensor, offsets: Tensor | None, include_last_offset: bool
) -> Tensor:
    """Check offsets and return the position in the flat indices at which each bag begins.

    Args:
        name: The table's name.
        indices: The indices: 1-D with `offsets`, or 2-D without, with one row for each bag.
        offsets: The position at which each bag begins, the first at 0.
        include_last_offset: Whether the last element of `offsets` is the number of indices.
    """
    if indices.dim() == 2 and offsets is None:
        # If the bags are empty, all begin at 0, which is also the end of the list.
        return torch.arange(indices.shape[0], device="cpu") * indices.shape[1]
    if indices.dim() != 1 or offsets is None or offsets.dim() != 1:
        raise UsageError(
            f"table {name!r}: indices of {indices.dim()} dimensions "
            f"{'without' if offsets is None else 'with'} offsets "
            f"{'' if offsets is None else f'of {offsets.dim()} '}given, expected 1-D indices with "
            "1-D offsets, or 2-D indices without offsets"
        )
    bag_offsets = prepare_indices(name, offsets, "offsets")
    if not include_last_offset:
        return bag_offsets
    if len(bag_offsets) == 0 or bag_offsets[-1] != len(indices):
        raise UsageError(
            f"table {name!r}: with include_last_offset the last offset must be "
            f"{len(indices)}, the number of indices"
        )
    return bag_offsets[:-1].contiguous()


def check_offsets(name: str, bag_offsets: Tensor, count: int) -> None:
    """Check that offsets ascend from 0 to at most `count`, as the core does for local tables."""
    ends = torch.cat([bag_offsets.new_zeros(1), bag_offsets])
    is_invalid = (ends.diff() < 0) | (bag_offsets > count)
    is_invalid[:1] |= bag_offsets[:1] != 0
    if len(invalid := is_invalid.nonzero()):
        raise offset_error(name, int(bag_offsets[invalid[0]]), int(invalid[0]), count)


def offset_error(name: str, offset: int, position: int, count: int) -> UsageError:
    """Return the error for an invalid offset of a bag."""
    return UsageError(
        f"table {name!r}: offset {offset} at position {position} given; the first must be 0, and "
        f"each must be between the previous offset and the number of indices, {count}"
    )


def prepare_weights(
    name: str, indices: Tensor, mode: str, weights: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Check per-sample weights and return them flat and contiguous; None if there are none."""
    if mode not in MODES:
        raise UsageError(f"table {name!r}: mode={mode!r} given, expected one of {[*MODES]}")
    if weights is None:
        return None
    if (
        mode != "sum"
        or weights.shape != indices.shape
        or weights.dtype != dtype
        or not is_strided_cpu(weights)
    ):
        raise UsageError(
            f"table {name!r}: per_sample_weights of {tuple(weights.shape)} and "
            f"{describe(weights)} with mode {mode!r} given, expected {tuple(indices.shape)} and "
            f"{dtype} on the CPU with 'sum'"
        )
    return weights.contiguous().view(-1)


def prepare_gradients(
    name: str, gradients: Tensor, shape: tuple[int, int], dtype: torch.dtype, origin: str = ""
) -> Tensor:
    """Check gradients of rows and return them as the core takes them: detached and contiguous."""
    if gradients.shape != shape or gradients.dtype != dtype or not is_strided_cpu(gradients):
        raise UsageError(
            f"table {name!r}: gradients of {tuple(gradients.shape)} and {describe(gradients)}"
            f"{origin} given, expected {shape} and {dtype} on the CPU"
        )
    return gradients.detach().contiguous()


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


def sum_gradients(
    batches: Sequence[BatchAddresses],
    width: int,
    dtype: torch.dtype,
    divisor: float = 1.0,
    share: Share = WHOLE,
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
    rows, sums = (
        torch.empty(max_rows, dtype=torch.int64, device="cpu"),
        torch.empty(max_rows, width, dtype=dtype, device="cpu"),
    )
    count = _native.coalesce_rows(
        batches, width, DTYPES[dtype], divisor, share, (rows.data_ptr(), sums.data_ptr())
    )
    return rows[:count], sums[:count]
