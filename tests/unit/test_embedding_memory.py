"""Gradients of tables of rows: tensors that a caller changes afterwards change no update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.embedding import SGD, RangeShards, Server, ShardedEmbeddingBag, Table

ROWS, WIDTH = 6, 2


def bag_of(mode: str, servers: int) -> tuple[ShardedEmbeddingBag, list[Server]]:
    """A bag over a table of zeros, with a learning rate of 1: rows become negative gradients."""
    shards = RangeShards(ROWS, servers)
    made = [
        Server.of_shard(
            shards,
            number,
            WIDTH,
            SGD(1.0),
            dtype=torch.float64,
            weight=lambda rows: torch.zeros(len(rows), WIDTH, dtype=torch.float64),
        )
        for number in range(servers)
    ]
    return ShardedEmbeddingBag(ROWS, WIDTH, made, mode=mode), made


def rows_of(servers: list[Server]) -> Tensor:
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
def test_passes_through_one_graph(mode: str, servers: int, actions: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, ROWS, (3, 2), generator=generator)
    factors = torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)
    bag, made = bag_of(mode, servers)
    alone = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, dtype=torch.float64)
    nn.init.zeros_(alone.weight)
    (gradient,) = torch.autograd.grad((alone(indices) * factors).sum(), [alone.weight])
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
    torch.testing.assert_close(rows_of(made), expected)


class Reusing(torch.autograd.Function):
    """The identity, whose backward pass returns one buffer each time."""

    buffer = torch.empty(1, WIDTH, dtype=torch.float64)

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return Reusing.buffer.copy_(gradients[0])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("servers", [1, 2])
def test_gradients_in_a_buffer_that_is_used_again(mode: str, servers: int) -> None:
    bag, made = bag_of(mode, servers)
    for row, factor in ((0, 1.0), (1, 5.0), (ROWS - 1, 7.0)):
        result: Tensor = Reusing.apply(bag(torch.tensor([[row]])))  # type: ignore[no-untyped-call]
        (result * factor).sum().backward()  # type: ignore[no-untyped-call]
    Reusing.buffer.fill_(100)
    bag.step()
    assert rows_of(made)[:, 0].tolist() == [-1, -5, 0, 0, 0, -7]


@pytest.mark.parametrize("staleness", [None, 1])
def test_arguments_that_are_used_again_before_the_step(staleness: int | None) -> None:
    table = Table(ROWS, WIDTH, SGD(1.0), weight=torch.zeros(ROWS, WIDTH))
    server = Server(table, trainers=2, staleness=staleness)
    indices, gradients = torch.tensor([0, 2]), torch.ones(2, WIDTH)
    futures = []
    for trainer in range(2):
        futures.append(server.begin_update(indices, gradients, trainer))
        gradients.fill_(100)
        indices.fill_(ROWS + 1)
        indices, gradients = torch.tensor([0, 2]), torch.ones(2, WIDTH)
    for future in futures:
        assert future.wait() == 1
    each = -1.0 if staleness is None else -2.0  # averaged, or one after the other
    assert table.view()[:, 0].tolist() == [each, 0, each, 0, 0, 0]
