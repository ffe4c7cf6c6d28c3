"""The sum of sparse tensors over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx.backend.dtypes import dtype_code
from phalanx.backend.operands import format_tensor
from phalanx.errors import CollectiveMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx import _native

__all__ = ["sparse_sum"]


def sparse_sum(
    native: _native.Group, tensor: torch.Tensor, op: dist.ReduceOp, size: int
) -> Callable[[float], _native.Status | None]:
    """Return a call that sums a sparse COO tensor over `size` ranks, in place.

    The ranks exchange their numbers of entries, then gather all entries on every rank, which adds
    up entries with the same indices. This is the algorithm of PyTorch's ProcessGroupGloo. The call
    raises `CollectiveMismatch` on all ranks if their tensors differ in shape.

    Raises:
        UsageError: The operator is not SUM, or the device is not the CPU.
    """
    if hash(op) != hash(dist.ReduceOp.SUM):
        raise UsageError(f"all_reduce: sparse tensors can only be summed, got {op}")
    if tensor.device.type != "cpu":
        raise UsageError(
            f"all_reduce: got {format_tensor(tensor)} on {tensor.device}, expected the CPU"
        )
    dtype_code(tensor.dtype, "all_reduce")

    def run(timeout: float) -> _native.Status | None:
        own = tensor.coalesce()
        shape = torch.tensor([own.sparse_dim(), *own.shape, own._nnz()])
        shapes = shape.new_empty(size, shape.numel())
        addresses = [row.data_ptr() for row in shapes]
        code = dtype_code(shape.dtype, "all_reduce")
        status = native.all_gather(shape.data_ptr(), addresses, shape.numel(), code, timeout)
        if status is not None:
            return status
        if not bool((shapes[:, :-1] == shape[:-1]).all()):
            raise CollectiveMismatch(
                "all_reduce of sparse tensors that differ from rank to rank; sparse dimensions "
                f"and shape, from rank 0 on: {shapes[:, :-1].tolist()}"
            )
        counts = shapes[:, -1].tolist()
        parts = []
        for part in (own.indices().t(), own.values()):
            whole, status = _gather_rows(native, part.contiguous(), counts, timeout)
            if status is not None:
                return status
            parts.append(whole)
        total = torch.sparse_coo_tensor(
            parts[0].t(), parts[1], tensor.shape, check_invariants=False
        )
        tensor.copy_(total.coalesce())
        return None

    return run


def _gather_rows(
    native: _native.Group, rows: torch.Tensor, counts: list[int], timeout: float
) -> tuple[torch.Tensor, _native.Status | None]:
    """Gather and concatenate the rows of all ranks; `counts` has the number of rows per rank."""
    whole = rows.new_empty(sum(counts), *rows.shape[1:])
    parts = torch.split(whole, counts)
    status = native.all_to_all(
        [rows.data_ptr()] * len(counts),
        [rows.numel()] * len(counts),
        [part.data_ptr() for part in parts],
        [part.numel() for part in parts],
        dtype_code(rows.dtype, "all_reduce"),
        timeout,
    )
    return whole, status
