"""Validation of the arguments of lookups and updates."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx import _native
from phalanx.errors import UsageError

__all__ = [
    "DTYPES",
    "MODES",
    "check_offsets",
    "index_error",
    "is_strided_cpu",
    "offset_error",
    "prepare_gradients",
    "prepare_indices",
    "prepare_offsets",
    "prepare_weights",
]

DTYPES = {
    torch.float32: _native.DTYPES["float32"],
    torch.float64: _native.DTYPES["float64"],
}
MODES = {"sum": 0, "mean": 1, "max": 2}


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
        return torch.arange(indices.shape[0]) * indices.shape[1]
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
