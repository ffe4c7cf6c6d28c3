"""Tensors in memory that the other ranks of the host can access."""

from __future__ import annotations

import os
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from phalanx import _native
from phalanx.errors import PhalanxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def empty_shared(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Create a tensor with which collectives of Phalanx skip the copies through the segment.

    Use it for data that is communicated repeatedly, such as gradient buckets; large operations then
    run at about the speed of memory. In all other respects, the tensor and its views are ordinary
    CPU tensors. Collectives take the fast path if the tensors of all ranks that provide data (for a
    broadcast, only the root) are in such memory, and stage them through the segment otherwise. This
    works with any group, and no other rank has to call this function.

    The memory belongs to this process. It is allocated at once, and freed when the tensor and its
    views are gone. In a forked child, the tensor is an ordinary one.

    Args:
        size: Shape, as for `torch.empty`: several integers or one sequence.
        dtype: The dtype; default `torch.get_default_dtype()`.

    Returns:
        A contiguous, page-aligned tensor with undefined values.

    Raises:
        UsageError: A size is negative.
        PhalanxError: Not enough memory.

    Example:
        >>> bucket = phalanx.empty_shared(25_000_000)
        >>> dist.all_reduce(bucket)
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    dtype = dtype or torch.get_default_dtype()
    if any(extent < 0 for extent in shape):
        raise UsageError(f"empty_shared: got the shape {list(shape)}, expected no negative size")
    count = prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    needed = count * dtype.itemsize
    try:
        memory = _native.allocate_shared(needed)
    except OSError as error:
        raise PhalanxError(
            f"empty_shared: no shared memory for {dtype}{list(shape)}, {needed} bytes "
            f"({os.strerror(error.errno or 0)}): free memory, or use torch.empty"
        ) from None
    return from_dlpack(memory).view(dtype).view(shape)
