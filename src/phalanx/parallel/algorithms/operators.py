"""The operators of `torch.distributed` as functions that combine two tensors."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.errors import UsageError

__all__ = ["Combine", "resolve_operator"]

Combine = Callable[[Tensor, Tensor, Tensor], object]
"""A function that combines the first tensor with the second into the third, which may be either."""

_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex64, torch.complex128}

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AVG": torch.add,  # divided at the end
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def resolve_operator(op: object, dtype: torch.dtype, caller: str) -> tuple[str, Combine]:
    """Return the operator's name and the function that combines two tensors of a dtype.

    Args:
        op: An operator of `torch.distributed.ReduceOp`.
        dtype: The dtype of the tensors.
        caller: The name of the calling function, for errors.

    Raises:
        UsageError: `op` is not an operator or has no meaning for the dtype, or the dtype is not
            supported.
    """
    supported = _supported_operators(dtype)
    if not supported:
        known = ", ".join(sorted(map(_label, _INTEGERS | _FLOATS | _COMPLEX)))
        raise UsageError(f"{caller}: {_label(dtype)} is not supported; expected one of: {known}")
    if not isinstance(op, ReduceOp | ReduceOp.RedOpType):
        raise UsageError(
            f"{caller}: op {op!r} given, expected a torch.distributed.ReduceOp; a group is given "
            "as group=..."
        )
    operators = ReduceOp.RedOpType.__members__
    given = next((name for name, operator in operators.items() if op == operator), str(op))
    if given in supported:
        return given, _function(given, dtype)
    raise UsageError(
        f"{caller}: {given} has no meaning for {_label(dtype)} here; expected one of: "
        f"{', '.join(supported)}"
    )


def _supported_operators(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype in _COMPLEX:
        return ("SUM", "PRODUCT", "AVG")
    if dtype in _FLOATS:
        return ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
    if dtype in _INTEGERS:
        return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return ()


def _function(name: str, dtype: torch.dtype) -> Combine:
    function = _FUNCTIONS[name]

    def combine(first: Tensor, second: Tensor, output: Tensor) -> None:
        function(first, second, out=output)

    if dtype not in _SIGNED:
        return combine
    signed = _SIGNED[dtype]
    lowest = torch.iinfo(signed).min

    # PyTorch has no arithmetic on wide unsigned integers. Except for the order, signed arithmetic
    # gives the same bits.
    def combine_signed(first: Tensor, second: Tensor, output: Tensor) -> None:
        function(first.view(signed), second.view(signed), out=output.view(signed))

    # Flipping the highest bit maps the unsigned order to the signed order.
    def compare_unsigned(first: Tensor, second: Tensor, output: Tensor) -> None:
        chosen = function(first.view(signed) ^ lowest, second.view(signed) ^ lowest)
        torch.bitwise_xor(chosen, lowest, out=output.view(signed))

    return compare_unsigned if name in ("MIN", "MAX") else combine_signed


def _label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
