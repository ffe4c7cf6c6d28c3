"""Parts of collectives: checks of their arguments, and native calls made of several calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx import _native
from phalanx.backend.operands import dtype_code, format_tensor
from phalanx.errors import CollectiveMismatch, UsageError

NativeCall = Callable[[float], "_native.Status | None"]
"""A call of the native group; its argument is the timeout in seconds."""


def tensors_per_rank(lists: Sequence[Any], size: int, name: str, role: str) -> list[torch.Tensor]:
    """Check and return the list of one tensor per rank, possibly nested in a list of one."""
    is_nested = len(lists) == 1 and not isinstance(lists[0], torch.Tensor)
    tensors: Any = lists[0] if is_nested else lists
    if len(tensors) != size:
        raise UsageError(f"{name}: got {len(tensors)} {role}, expected one per rank, {size}")
    return list(tensors)


def check_root(root: int, size: int, name: str) -> int:
    """Return the root if it is a rank of the group."""
    if not 0 <= root < size:
        raise UsageError(f"{name}: root {root}, expected a rank from 0 to {size - 1}")
    return root


def check_same_length(outputs: Sequence[object], inputs: Sequence[object], name: str) -> None:
    """Check that there are as many outputs as inputs."""
    if len(outputs) != len(inputs):
        raise UsageError(f"{name}: got {len(outputs)} outputs for {len(inputs)} inputs")


def size_error(
    whole: torch.Tensor, part: torch.Tensor, size: int, name: str, roles: tuple[str, str]
) -> UsageError:
    """Return the error for a tensor that is not as large as `size` parts; `roles` names both."""
    return UsageError(
        f"{name}: the {roles[0]} {format_tensor(whole)} has {whole.numel()} elements, "
        f"expected {size * part.numel()}: {size} times those of the {roles[1]} "
        f"{format_tensor(part)}"
    )


def check_disjoint(
    outputs: Sequence[torch.Tensor], flats: Sequence[torch.Tensor], operation: str
) -> None:
    """Check that outputs share no memory, since only one of them could keep its result.

    Of outputs that are not contiguous, only those that begin at the same element are found.

    Args:
        outputs: The tensors of the list.
        flats: For each of them, itself if it is contiguous, else a copy.
        operation: The name of the operation, for errors.

    Raises:
        UsageError: Two of them share memory.
    """
    sizes = [flat.nbytes for flat in flats]
    is_shared = _native.have_common_memory(addresses_of(flats), sizes)
    if not is_shared and any(map(operator.is_not, outputs, flats)):
        starts = [output.data_ptr() for output in outputs if output.numel()]
        is_shared = len({*starts}) < len(starts)
    if is_shared:
        raise UsageError(
            f"{operation}: tensors of the list of outputs share memory ([tensor] * n, or views of "
            "one tensor?): each needs memory of its own, as from torch.empty_like()"
        )


def overlaps_any(tensor: torch.Tensor, tensors: Sequence[torch.Tensor], dtype: int) -> bool:
    """Return whether a contiguous tensor overlaps any of several that do not overlap each other."""
    starts, counts = addresses_of(tensors), counts_of(tensors)
    return _native.overlap([tensor.data_ptr()], [tensor.numel()], starts, counts, dtype)


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the addresses of contiguous tensors."""
    return list(map(torch.Tensor.data_ptr, tensors))


def counts_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the element counts of tensors."""
    return list(map(torch.Tensor.numel, tensors))


def split_rows(
    flat: torch.Tensor, splits: Sequence[int], size: int, name: str, role: str
) -> tuple[list[int], list[int]]:
    """Return the addresses and the element counts of the rows for each of `size` ranks."""
    rows = flat.size(0) if flat.dim() else 1
    if not splits:
        if rows % size:
            raise UsageError(
                f"{name}: the {role} {format_tensor(flat)} has {rows} rows, which {size} "
                f"ranks cannot share equally: give {role}_split_sizes"
            )
        counts = [flat.numel() // size] * size
    else:
        try:
            sizes = list(map(operator.index, splits))
        except TypeError:
            sizes = []  # fails the check of the length below
        if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
            raise UsageError(
                f"{name}: {role}_split_sizes are {list(splits)}, expected {size} integers, "
                f"one per rank, that sum up to the {rows} rows of the {role} {format_tensor(flat)}"
            )
        row = flat.numel() // rows if rows else 0
        counts = [each * row for each in sizes]
    addresses, start = [], flat.data_ptr()
    for count in counts:
        addresses.append(start)
        start += count * flat.element_size()
    return addresses, counts


def divide_after(call: NativeCall, result: torch.Tensor, size: int) -> NativeCall:
    """Return a call that then divides its result by `size`, rounded towards zero."""

    def run(timeout: float) -> _native.Status | None:
        status = call(timeout)
        if status is None:
            with torch.inference_mode():
                result.div_(size, rounding_mode="trunc")
        return status

    return run


def run_sequentially(calls: Iterable[NativeCall]) -> NativeCall:
    """Return a call that makes all calls in order, each with the whole timeout, until one fails."""
    steps = list(calls)

    def run(timeout: float) -> _native.Status | None:
        for step in steps:
            status = step(timeout)
            if status is not None:
                return status
        return None

    return run


def sum_sparse(
    native: _native.Group, tensor: torch.Tensor, op: dist.ReduceOp, size: int
) -> NativeCall:
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
        local = tensor.coalesce()
        shape = torch.tensor([local.sparse_dim(), *local.shape, local._nnz()], device="cpu")
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
        for part in (local.indices().t(), local.values()):
            whole, status = _gather_rows(native, part.contiguous(), counts, timeout)
            if status is not None:
                return status
            parts.append(whole)
        total = torch.sparse_coo_tensor(
            parts[0].t(),
            parts[1],
            tensor.shape,
            check_invariants=False,
            device=tensor.device,
            dtype=tensor.dtype,
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
        addresses_of(parts),
        counts_of(parts),
        dtype_code(rows.dtype, "all_reduce"),
        timeout,
    )
    return whole, status
