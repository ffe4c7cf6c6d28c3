"""Tensors keep their strides when sent in calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import rpc
from tests.ranks import RankServer
from tests.rpc_training import worker


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def echo(tensor: Tensor) -> Tensor:
    return tensor


def double_in_place(tensor: Tensor) -> Tensor:
    return tensor.mul_(2)


def check_strides() -> None:
    with worker() as rank:
        if rank == 0:
            for scale in (1, 40):  # inline in the message, and outside it
                check_views(scale)
            check_gaps()
            endless = rpc.rpc_sync("w1", echo, (torch.ones(1).expand(2**50),))
            assert (endless.shape, endless.stride()) == ((2**50,), (0,))
            matrix = torch.randn(300, 401).t()
            assert torch.equal(rpc.rpc_async("w1", double_in_place, (matrix,)).wait(), matrix * 2)
        dist.barrier()


def check_views(scale: int) -> None:
    matrix = torch.randn(3 * scale, 4 * scale)
    images = torch.randn(2, 3, 2 * scale, 5).to(memory_format=torch.channels_last)
    views = [
        matrix.t(),
        matrix[0].expand(5, 4 * scale),
        matrix[:, : 3 * scale],
        torch.randn(scale, 5)[:, 2:4].t().unsqueeze(1),
        images,
        images.sum(1).unsqueeze(1),
        torch.arange(9.0 * scale).unfold(0, 3, 1),
        torch.randn(scale, 2, 3, dtype=torch.complex64).permute(2, 0, 1).conj(),
        torch.randn(4 * scale, dtype=torch.complex64).expand(3, 4 * scale).conj(),
        torch.randn(scale, 5, dtype=torch.complex64)[:, 1:4].conj(),
        matrix.bfloat16().t(),
        torch.empty(0, scale).t(),
    ]
    for view in views:
        received = rpc.rpc_sync("w1", echo, (view,))
        assert torch.equal(received, view)
        is_strided = not (view.is_contiguous() or view.is_conj())
        if is_strided and (scale == 1 or is_mostly_dense(view)):
            assert received.stride() == view.stride(), view.shape


def is_mostly_dense(view: Tensor) -> bool:
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)
    )
    return span <= 2 * view.numel()


def check_gaps() -> None:
    """A tensor is sent without strides if the gaps are larger than its elements."""
    matrix = torch.randn(300, 401)
    received = rpc.rpc_sync("w1", echo, (matrix[:, ::7],))
    assert torch.equal(received, matrix[:, ::7])
    assert received.is_contiguous()


@pytest.mark.parametrize("hosts", ["", "ab"])
def test_strides_are_kept(ranks: RankServer, hosts: str) -> None:
    ranks.run(2, check_strides, hosts=hosts)
