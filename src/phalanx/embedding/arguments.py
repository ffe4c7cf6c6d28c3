"""Checks of the arguments of lookups: indices, offsets of bags, weights and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx import _native
from phalanx.errors import UsageError

__all__ = [
    "DTYPES",
    "MODES",
    "check_order",
    "checked_begins",
    "checked_gradients",
    "checked_indices",
    "checked_weights",
    "in_memory",
    "out_of_range",
    "wrong_offset",
]

DTYPES = {
    torch.float32: _native.DTYPES["float32"],
    torch.float64: _native.DTYPES["float64"],
}
MODES = {"sum": 0, "mean": 1, "max": 2}


def out_of_range(name: str, index: int, rows: int) -> UsageError:
    """Return the error for an out-of-range index."""
    return UsageError(
        f"table {name!r}: index {index} is out of range, expected 0 to {rows - 1} (it has {rows} "
        "rows); nothing was read or updated"
    )


def in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and in host memory."""
    return tensor.is_cpu and tensor.layout == torch.strided


def described(tensor: Tensor) -> str:
    """Describe a tensor's dtype, device and layout, for errors."""
    layout = "" if tensor.layout == torch.strided else f", of layout {tensor.layout}"
    return f"{tensor.dtype} on {tensor.device}{layout}"


def checked_indices(name: str, indices: Tensor, what: str = "indices") -> Tensor:
    """Return indices as the core takes them: 1-D, contiguous, int64, in host memory."""
    if indices.dtype not in {torch.int64, torch.int32} or not in_memory(indices):
        raise UsageError(
            f"table {name!r}: {what} of {described(indices)} given, expected int64 or int32 on the "
            "CPU"
        )
    if indices.dim() == 1 and indices.dtype == torch.int64 and indices.is_contiguous():
        return indices  # the usual case: each operation below costs a microsecond
    return indices.detach().to(torch.int64).contiguous().view(-1)


def checked_begins(
    name: str, indices: Tensor, offsets: Tensor | None, include_last: bool
) -> Tensor:
    """Return the position in the flat list of indices at which each bag begins.

    Args:
        name: The table's name.
        indices: Indices: 1-D with `offsets`, or 2-D, one row for each bag, without.
        offsets: The position at which each bag begins, the first at 0.
        include_last: Whether the last element of `offsets` is the number of indices.
    """
    if indices.dim() == 2 and offsets is None:
        # If the bags are empty, all begin at the end of the list, which is 0.
        return torch.arange(indices.shape[0]) * indices.shape[1]
    if indices.dim() != 1 or offsets is None or offsets.dim() != 1:
        raise UsageError(
            f"table {name!r}: indices of {indices.dim()} dimensions "
            f"{'without' if offsets is None else 'with'} offsets "
            f"{'' if offsets is None else f'of {offsets.dim()} '}given, expected 1 with offsets "
            "of 1, or 2 without"
        )
    begins = checked_indices(name, offsets, "offsets")
    if not include_last:
        return begins
    if len(begins) == 0 or begins[-1] != len(indices):
        raise UsageError(
            f"table {name!r}: with include_last_offset the last offset must be "
            f"{len(indices)}, the number of indices"
        )
    return begins[:-1].contiguous()


def check_order(name: str, begins: Tensor, count: int) -> None:
    """Check that offsets ascend from 0 to at most `count`, as the core does for its own batches."""
    ends = torch.cat([begins.new_zeros(1), begins])
    wrong = (ends.diff() < 0) | (begins > count)
    wrong[:1] |= begins[:1] != 0
    if len(places := wrong.nonzero()):
        raise wrong_offset(name, int(begins[places[0]]), int(places[0]), count)


def wrong_offset(name: str, offset: int, number: int, count: int) -> UsageError:
    """Return the error for an invalid offset of a bag."""
    return UsageError(
        f"table {name!r}: offset {offset} (number {number}) given, expected 0 for the first, and "
        f"each from the one before it to the number of indices, {count}"
    )


def checked_weights(
    name: str, indices: Tensor, mode: str, weights: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return the factors of the indices, flat and contiguous; None if there are none."""
    if mode not in MODES:
        raise UsageError(f"table {name!r}: mode={mode!r} given, expected one of {[*MODES]}")
    if weights is None:
        return None
    if (
        mode != "sum"
        or weights.shape != indices.shape
        or weights.dtype != dtype
        or not in_memory(weights)
    ):
        raise UsageError(
            f"table {name!r}: per_sample_weights of {tuple(weights.shape)} and "
            f"{described(weights)} with mode {mode!r} given, expected {tuple(indices.shape)} and "
            f"{dtype} on the CPU with 'sum'"
        )
    return weights.contiguous().view(-1)


def checked_gradients(
    name: str, gradients: Tensor, shape: tuple[int, int], dtype: torch.dtype, giver: str = ""
) -> Tensor:
    """Return gradients of rows as the core takes them: detached and contiguous."""
    if gradients.shape != shape or gradients.dtype != dtype or not in_memory(gradients):
        raise UsageError(
            f"table {name!r}: gradients of {tuple(gradients.shape)} and {described(gradients)}"
            f"{giver} given, expected {shape} and {dtype} on the CPU"
        )
    return gradients.detach().contiguous()
