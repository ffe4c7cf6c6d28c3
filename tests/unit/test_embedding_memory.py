"""Gradients of embedding tables: changing tensors after a call does not change the update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.embedding import (
    SGD,
    EmbeddingServer,
    EmbeddingTable,
    RangeSharding,
    ShardedEmbeddingBag,
)

ROWS, WIDTH = 6, 2


def make_bag(mode: str, servers: int) -> tuple[ShardedEmbeddingBag, list[EmbeddingServer]]:
    """Create a bag over a table of zeros with learning rate 1: rows become negative gradients."""
    sharding = RangeSharding(ROWS, servers)
    server_list = [
        EmbeddingServer.create_shard(
            sharding,
            number,
            WIDTH,
            SGD(1.0),
            dtype=torch.float64,
            weight=lambda rows: torch.zeros(len(rows), WIDTH, dtype=torch.float64),
        )
        for number in range(servers)
    ]
    return ShardedEmbeddingBag(ROWS, WIDTH, server_list, mode=mode), server_list


def get_rows(servers: list[EmbeddingServer]) -> Tensor:
    return torch.cat([server.table.view() for server in servers])


@settings(max_examples=30)
@given(
    mode=st.sampled_from(["sum", "mean", "max"]),
    servers=st.integers(1, 3),
    actions=st.lists(st.sampled_from(["backward", "backward", "step", "zero_grad"]), max_size=12),
    seed=st.integers(0, 2**32 - 1),
)
@example(mode="max", servers=1, actions=["backward", "step", "backward", "step"], seed=0)
@example(mode="sum", servers=2, actions=["backward", "zero_grad", "backward", "step"], seed=0)
def test_repeated_backward_through_one_graph(
    mode: str, servers: int, actions: list[str], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, ROWS, (3, 2), generator=generator)
    factors = torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)
    bag, server_list = make_bag(mode, servers)
    reference = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, dtype=torch.float64)
    nn.init.zeros_(reference.weight)
    (gradient,) = torch.autograd.grad((reference(indices) * factors).sum(), [reference.weight])
    loss = (bag(indices) * factors).sum()
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    passes = 0
    for action in actions:
        if action == "backward":
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            passes += 1
            continue
        if action == "step":
            bag.step()
            expected -= passes * gradient
        else:
            bag.zero_grad()
        passes = 0
    torch.testing.assert_close(get_rows(server_list), expected)


class BufferReuse(torch.autograd.Function):
    """The identity, whose backward pass always returns the same buffer."""

    buffer = torch.empty(1, WIDTH, dtype=torch.float64)

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return BufferReuse.buffer.copy_(gradients[0])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("servers", [1, 2])
def test_reused_gradient_buffer(mode: str, servers: int) -> None:
    bag, server_list = make_bag(mode, servers)
    for row, factor in ((0, 1.0), (1, 5.0), (ROWS - 1, 7.0)):
        result: Tensor = BufferReuse.apply(bag(torch.tensor([[row]])))  # type: ignore[no-untyped-call]
        (result * factor).sum().backward()  # type: ignore[no-untyped-call]
    BufferReuse.buffer.fill_(100)
    bag.step()
    assert get_rows(server_list)[:, 0].tolist() == [-1, -5, 0, 0, 0, -7]


@pytest.mark.parametrize("staleness", [None, 1])
def test_arguments_reused_before_the_step(staleness: int | None) -> None:
    table = EmbeddingTable(ROWS, WIDTH, SGD(1.0), weight=torch.zeros(ROWS, WIDTH))
    server = EmbeddingServer(table, trainers=2, staleness=staleness)
    indices, gradients = torch.tensor([0, 2]), torch.ones(2, WIDTH)
    futures = []
    for trainer in range(2):
        futures.append(server.begin_update(indices, gradients, trainer))
        gradients.fill_(100)
        indices.fill_(ROWS + 1)
        indices, gradients = torch.tensor([0, 2]), torch.ones(2, WIDTH)
    for future in futures:
        assert future.wait() == 1
    value = -1.0 if staleness is None else -2.0  # averaged, or applied one after the other
    assert table.view()[:, 0].tolist() == [value, 0, value, 0, 0, 0]
