"""Tensors in memory that the other ranks of the host can reach."""

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
    """Make a tensor on which collectives of Phalanx skip the copies through the segment.

    Use it for what is communicated again and again, such as gradient buckets: large operations then
    take about as long as the memory needs. It is an ordinary CPU tensor in every other way, and so
    are its views: what counts is where an operation's tensors lie. The fast path is taken where
    those of all ranks do (of all ranks that give something: the root's, for a broadcast); else they
    are staged as always. Any group will do, and no other rank has to call this.

    The memory is this process's own, taken at once, and given back when the tensor and its views
    are gone. To a forked child the tensor is one like any other.

    Args:
        size: Shape, as for `torch.empty`: several integers or one sequence.
        dtype: Default `torch.get_default_dtype()`.

    Returns:
        A contiguous tensor with undefined values, page-aligned.

    Raises:
        UsageError: A size is negative.
        PhalanxError: There is not so much memory.

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
        memory = _native.shared_bytes(needed)
    except OSError as error:
        raise PhalanxError(
            f"empty_shared: no shared memory for {dtype}{list(shape)}, {needed} bytes "
            f"({os.strerror(error.errno or 0)}): free memory, or use torch.empty"
        ) from None
    return from_dlpack(memory).view(dtype).view(shape)
