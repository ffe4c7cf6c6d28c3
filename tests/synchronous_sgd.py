"""Plain synchronous SGD on every rank, the reference for `SharedDataParallel`, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from phalanx.parallel import SharedDataParallel
from tests.ranks import RankServer

BUCKET = 32 * 1024


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def average(module: nn.Module) -> None:
    """Average each gradient by an all-reduce; a rank without a gradient contributes zeros."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        present = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(present)
        if present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


def same(one: Any, other: Any) -> bool:
    """Return whether tensors are bitwise equal, except for the sign of zeros and kind of NaNs."""
    if one is None or other is None:
        return one is other
    equal = torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return one.dtype == other.dtype and one.shape == other.shape and equal


def check(model: SharedDataParallel, replica: nn.Module, what: str) -> None:
    pairs = zip(model.module.named_parameters(), replica.parameters(), strict=True)
    for (name, one), other in pairs:
        assert same(one.detach(), other.detach()), (what, name)
        assert same(one.grad, other.grad), (what, f"gradient of {name}")
    for (name, one), other in zip(model.module.named_buffers(), replica.buffers(), strict=True):
        assert same(one, other), (what, name)


def compare_states(one: dict[str, Any], other: dict[str, Any], model: SharedDataParallel) -> None:
    assert one["param_groups"] == other["param_groups"]
    for index, state in other["state"].items():
        if model._shared.trained[index].numel():
            assert set(one["state"][index]) == set(state)
        for key, value in state.items():
            if model._shared.trained[index].numel():
                found = one["state"][index][key]
                assert same(found, value) if isinstance(value, Tensor) else found == value, key


@pytest.fixture(autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Preload the module that the first step of an optimizer imports."""
    ranks.preload("torch._dynamo")


@pytest.fixture
def seed() -> int:
    value = int(torch.randint(2**20, ()))
    print(f"seed {value}")
    return value
