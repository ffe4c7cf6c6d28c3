"""Shared parts of the conformance tests: dtypes, sizes, random data, and numpy as an oracle.

Every rank can create the data of all ranks from the test's seed, so each checks its own results.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx import _native

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 "
        "float16 bfloat16 float32 float64 complex64 complex128"
    ).split()
}
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = tuple(name for name in DTYPES if "int" in name)
# 4096 float32 elements fit beside the flag; 65,536 are a chunk of the large path.
SIZES = (0, 1, 3, 1000, 4096, 4097, 65_535, 65_536, 65 * 1024)
LARGE = 2**20 + 7

FOLD: dict[str, Any] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
    "AVG": np.add,
}


def operators(dtype: str) -> tuple[str, ...]:
    """Return the names in `torch.distributed` of the operators that are defined for a dtype."""
    if dtype in COMPLEX:
        return ("SUM", "AVG")  # torch.distributed itself rejects the others
    if dtype in FLOATS:
        return ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
    return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def reduce_op(name: str) -> Any:
    return getattr(ReduceOp, name)


def data(dtype: str, shape: int | Sequence[int], *seed: int) -> Tensor:
    """Return random values: all bits of an integer, a normal distribution otherwise."""
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    random = np.random.default_rng(seed)
    if dtype == "bool":
        values: Any = random.integers(0, 2, size).astype(bool)
    elif dtype in INTEGERS:
        info = np.iinfo(dtype)
        values = random.integers(info.min, info.max, size, dtype=dtype, endpoint=True)
    elif has_several_hosts():
        values = random.integers(-2, 3, size).astype(np.float64)
        if dtype in COMPLEX:
            values = values + 1j * random.integers(-2, 3, size)
    elif dtype in COMPLEX:
        values = random.standard_normal(size) + 1j * random.standard_normal(size)
    else:
        values = random.standard_normal(size)
    return torch.as_tensor(values).to(DTYPES[dtype]).reshape(size)


def has_several_hosts() -> bool:
    """Return whether ranks are on several simulated hosts.

    Floats are combined in another order then. The data are small whole numbers in this case, so
    that the order does not matter.
    """
    return "PHALANX_HOST_ID" in os.environ


def poisoned(like: Tensor, *shape: int) -> Tensor:
    """Return a tensor of this shape, by default the same, that no result equals by accident."""
    shape = shape or tuple(like.shape)
    size = math.prod(shape) * like.element_size()
    flat = torch.full((size,), 0xA5, dtype=torch.uint8, device=like.device)
    return flat.view(like.dtype).reshape(shape)


def wide(tensor: Tensor) -> Any:
    """Return a tensor in numpy, in the dtype in which its reduction accumulates."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    return tensor.numpy()


def folded(op: str, inputs: Iterable[Tensor]) -> Tensor:
    """Return the reduction in rank order, x0 op x1 op ..., accumulated in the dtype of `wide`."""
    tensors = list(inputs)
    result = functools.reduce(FOLD[op], map(wide, tensors))
    if op == "AVG":
        result = divided(result, len(tensors))
    return torch.as_tensor(result).to(tensors[0].dtype).reshape(tensors[0].shape)


def divided(values: Any, divisor: int) -> Any:
    """Divide values by a real number; numpy would divide complex values by a complex number."""
    if np.iscomplexobj(values):
        return divided(values.real, divisor) + 1j * divided(values.imag, divisor)
    return values / values.dtype.type(divisor)


def exact(op: str, inputs: Iterable[Tensor]) -> tuple[Any, Any]:
    """Return a reduction of floats in float64, and the tolerance for a result in their dtype."""
    tensors = list(inputs)
    kind = torch.complex128 if tensors[0].is_complex() else torch.float64
    values = [tensor.to(kind).numpy() for tensor in tensors]
    result = functools.reduce(FOLD[op], values)
    magnitude = functools.reduce(FOLD[op], map(np.abs, values))
    if op == "AVG":
        result, magnitude = result / len(values), magnitude / len(values)
    if op in ("MIN", "MAX"):
        return result, np.zeros_like(magnitude)
    info = torch.finfo(tensors[0].dtype)
    # One rounding per step; a denormal result is off by its own spacing.
    return result, (len(values) + 1) * info.eps * magnitude + info.tiny


def bits(tensor: Tensor) -> bytes:
    # A copy: a view of one element counts as contiguous, whatever its stride is.
    contiguous = tensor.detach().clone(memory_format=torch.contiguous_format)
    return contiguous.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits of tensors, for comparisons between ranks."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(bits(tensor))
    return total.hexdigest()


def check_bits(result: Tensor, expected: Tensor, what: str) -> None:
    assert result.dtype == expected.dtype, f"{what}: {result.dtype}, expected {expected.dtype}"
    assert result.shape == expected.shape, f"{what}: {result.shape}, expected {expected.shape}"
    if bits(result) == bits(expected):
        return
    width = result.element_size()
    got, want = (
        np.frombuffer(bits(tensor), np.uint8).reshape(-1, width) for tensor in (result, expected)
    )
    wrong = np.flatnonzero((got != want).any(axis=1))
    first = int(wrong[0])
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(got)} elements differ, the first at {first}: "
        f"{result.reshape(-1)[first]} is not {expected.reshape(-1)[first]}"
    )


def check_close(result: Tensor, expected: Any, tolerance: Any, what: str) -> None:
    kind = torch.complex128 if result.is_complex() else torch.float64
    off = np.abs(result.to(kind).numpy() - expected)
    assert (off <= tolerance).all(), f"{what}: off by {off.max()}"


def supported_by_core(dtype: str, op: str) -> bool:
    return _native.supports(_native.DTYPES[dtype], _native.REDUCE_OPS[op.lower()])


Collective = Callable[..., object]
