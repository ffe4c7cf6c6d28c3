"""Tensors of more than 2^31 elements, which overflow 32-bit indices."""

from __future__ import annotations

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankServer

COUNT = 2**31 + 4099


def fill(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Fill a tensor with values that differ near the ends and around 2^31, to detect shifts."""
    tensor.zero_()
    for start in (0, 2**20, 2**31 - 4096, len(tensor) - 4096):
        tensor[start : start + 4096] = (torch.arange(4096) + 1 + rank) % 100
    return tensor


def all_reduce() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = fill(torch.empty(COUNT, dtype=torch.uint8), rank)
    dist.all_reduce(tensor)
    for start in (0, 2**20, 2**31 - 4096, COUNT - 4096):
        expected = sum((torch.arange(4096) + 1 + r) % 100 for r in range(size))
        assert torch.equal(tensor[start : start + 4096].long(), expected), start
    assert tensor[2**30] == 0


def broadcast_and_message() -> None:
    rank = dist.get_rank()
    tensor = torch.empty(COUNT, dtype=torch.uint8)
    if rank == 0:
        fill(tensor, 3)
        dist.broadcast(tensor, 0)
        dist.send(tensor, 1)
        return
    for receive in (lambda: dist.broadcast(tensor, 0), lambda: dist.recv(tensor, 0)):
        tensor.fill_(255)
        receive()
        for start in (0, 2**20, 2**31 - 4096, COUNT - 4096):
            expected = (torch.arange(4096) + 4) % 100
            assert torch.equal(tensor[start : start + 4096].long(), expected), start
        assert tensor[2**30] == 0


@pytest.fixture(autouse=True)
def _enough_memory() -> None:
    available = psutil.virtual_memory().available
    assert available > 3 * COUNT, f"{available} bytes of memory available, two ranks need {COUNT}"


@pytest.mark.slow
def test_all_reduce(ranks: RankServer) -> None:
    ranks.run(2, all_reduce, timeout=120)


@pytest.mark.slow
def test_broadcast_and_message(ranks: RankServer) -> None:
    ranks.run(2, broadcast_and_message, timeout=120)
