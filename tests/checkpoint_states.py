"""States that tests save, and comparisons with loaded states."""

import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_numbered", "numbered", "random_tensor", "same", "same_bits", "steps"]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of random bytes, including all kinds of NaN."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    length = math.prod(shape) * dtype.itemsize
    if length == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(os.urandom(length)), dtype=dtype).view(shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pair = [it.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for it in (one, other)]
    return torch.equal(*pair)


def same(one: Any, other: Any) -> bool:
    """Return whether a loaded value equals `other` in types and bits, with tuples as lists."""
    if isinstance(other, Tensor):
        return isinstance(one, Tensor) and same_bits(one, other)
    if isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def numbered(step: int) -> dict[str, Any]:
    return {"step": step, "weight": torch.full((1000,), float(step)), "ragged": torch.arange(step)}


def check_numbered(checkpoint: Any, step: int) -> None:
    assert checkpoint.step == step
    assert same(checkpoint.state, numbered(step))


def steps(folder: Path) -> list[int]:
    names = [name for name in os.listdir(folder) if re.fullmatch(r"\d+-step-\d+", name)]
    return sorted(int(name.partition("-step-")[2]) for name in names)
