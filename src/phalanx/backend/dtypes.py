"""The core's codes for dtypes and reduction operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from phalanx import _native
from phalanx.backend.operands import format_tensor
from phalanx.errors import UsageError

DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in _native.DTYPES.items()
}
DTYPE_NAMES: dict[int, str] = {code: name for name, code in _native.DTYPES.items()}

# The hash of an operator is its number in PyTorch, and the cheapest way to get it.
_OPS: dict[int, int] = {
    hash(getattr(ReduceOp, name.upper())): code
    for name, code in _native.REDUCE_OPS.items()
    if name != "none"
}
_SUM = hash(ReduceOp.SUM)
_AVG = hash(ReduceOp.AVG)
_PREMUL_SUM = hash(ReduceOp.PREMUL_SUM)
OP_NAMES: dict[int, str] = {code: name.upper() for name, code in _native.REDUCE_OPS.items()}


class Reduction(NamedTuple):
    """The implementation of an operator on a dtype.

    Attributes:
        dtype: The core's code of the dtype.
        op: The core's code of the operator; that of SUM for PREMUL_SUM and for AVG of integers.
        premultiplies: Whether tensors are first multiplied by a factor, as PREMUL_SUM requires.
        divides: Whether the result is divided by the world size, rounded towards zero. This is so
            for AVG of integers, as on NCCL.
    """

    dtype: int
    op: int
    premultiplies: bool = False
    divides: bool = False


# Precomputed, so that an operation needs a single look-up; even this is a tenth of its total cost.
_REDUCTIONS: dict[tuple[torch.dtype, int], Reduction] = {
    (dtype, number): Reduction(code, op)
    for dtype, code in DTYPE_CODES.items()
    for number, op in _OPS.items()
    if _native.supports(code, op)
}
_REDUCTIONS.update(
    ((dtype, _PREMUL_SUM), Reduction(code, _OPS[_SUM], premultiplies=True))
    for dtype, code in DTYPE_CODES.items()
    if dtype.is_floating_point or dtype.is_complex
)
_REDUCTIONS.update(
    ((dtype, _AVG), Reduction(DTYPE_CODES[dtype], _OPS[_SUM], divides=True))
    # PyTorch cannot divide larger unsigned integers.
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
)


def dtype_code(dtype: torch.dtype, operation: str) -> int:
    """Return the core's code of a dtype; the error names the `operation`."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        known = ", ".join(_native.DTYPES)
        raise UsageError(f"{operation}: {dtype} is not supported; expected one of: {known}")
    return code


def find_reduction(op: ReduceOp, tensor: torch.Tensor, operation: str) -> Reduction:
    """Return the reduction of a tensor by an operator; errors name the `operation`."""
    number, dtype = hash(op), tensor.dtype
    reduction = _REDUCTIONS.get((dtype, number))
    if reduction is not None:
        return reduction
    code = dtype_code(dtype, operation)
    if number == _PREMUL_SUM:
        raise UsageError(f"{operation}: PREMUL_SUM needs floats, got {format_tensor(tensor)}")
    if number not in _OPS:
        raise UsageError(f"{operation}: unknown reduction {op}")
    possible = [OP_NAMES[o] for n, o in _OPS.items() if (dtype, n) in _REDUCTIONS]
    raise UsageError(
        f"{operation}: {OP_NAMES[_OPS[number]]} has no meaning for {DTYPE_NAMES[code]}; "
        f"expected one of: {', '.join(possible)}"
    )


def premul_factor(op: ReduceOp) -> float | torch.Tensor:
    """Return the factor of a PREMUL_SUM."""
    state: Any = op.__getstate__()
    factor: float | torch.Tensor = state[1]
    return factor
