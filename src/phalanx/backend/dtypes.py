"""Numbers by which the core knows dtypes and reduction operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from phalanx import _native
from phalanx.errors import UsageError

CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in _native.DTYPES.items()
}
NAMES: dict[int, str] = {code: name for name, code in _native.DTYPES.items()}

# The number that PyTorch gives an operator is its hash: the cheapest way to ask for it.
_OPS: dict[int, int] = {
    hash(getattr(ReduceOp, name.upper())): code
    for name, code in _native.REDUCE_OPS.items()
    if name != "none"
}
_SUM = hash(ReduceOp.SUM)
_PREMUL_SUM = hash(ReduceOp.PREMUL_SUM)
OP_NAMES: dict[int, str] = {code: name.upper() for name, code in _native.REDUCE_OPS.items()}
_SUPPORTED = frozenset(
    (dtype, op)
    for dtype in _native.DTYPES.values()
    for op in _OPS.values()
    if _native.supports(dtype, op)
)


def code_of(dtype: torch.dtype, what: str) -> int:
    """The core's number of a dtype; `what` names the operation in the error."""
    code = CODES.get(dtype)
    if code is None:
        known = ", ".join(_native.DTYPES)
        raise UsageError(f"{what}: {dtype} is not supported; expected one of: {known}")
    return code


def reduction(op: ReduceOp, dtype: int, what: str) -> int:
    """The core's number of an operator, checked against the dtype. PREMUL_SUM counts as SUM."""
    number = hash(op)
    code = _OPS.get(_SUM if number == _PREMUL_SUM else number)
    if code is None:
        raise UsageError(f"{what}: unknown reduction {op}")
    if (dtype, code) not in _SUPPORTED:
        possible = [OP_NAMES[o] for o in _OPS.values() if (dtype, o) in _SUPPORTED]
        raise UsageError(
            f"{what}: {OP_NAMES[code]} has no meaning for {NAMES[dtype]}; "
            f"expected one of: {', '.join(possible)}"
        )
    return code


def premultiplier(op: ReduceOp) -> float | torch.Tensor | None:
    """The factor of a PREMUL_SUM; None for other operators."""
    if hash(op) != _PREMUL_SUM:
        return None
    state: Any = op.__getstate__()
    factor: float | torch.Tensor = state[1]
    return factor
