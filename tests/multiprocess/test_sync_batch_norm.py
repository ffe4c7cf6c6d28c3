"""`SyncBatchNorm` on the CPU against BatchNorm on the whole batch, in one process."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import CollectiveMismatch, UsageError
from phalanx.parallel import (
    SharedDataParallel,
    SyncBatchNorm,
    average_gradients,
    average_gradients_per_parameter,
)
from tests.ranks import RankServer
from tests.synchronous_sgd import BUCKET, average, preloaded, same, seed, seeded

__all__ = ["preloaded", "seed"]


SHAPES = [(5,), (5, 7), (3, 4, 6), (2, 3, 2, 3)]
PLAIN: list[Any] = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False, "eps": 0.1},
]


def check(seed: int) -> None:
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(seed)
    for (shape, layer_class), options in [
        (p, o) for p in zip(SHAPES, PLAIN, strict=True) for o in OPTIONS
    ]:
        plain = layer_class(shape[0], dtype=torch.float64, **options)
        ours = SyncBatchNorm.convert_sync_batchnorm(
            layer_class(shape[0], dtype=torch.float64, **options)
        )
        assert type(ours) is SyncBatchNorm
        if plain.affine:
            with torch.no_grad():
                plain.weight.normal_(generator=random)
                plain.bias.normal_(generator=random)
        ours.load_state_dict(plain.state_dict())
        for _ in range(2):
            # Ranks have batches of different sizes; that of the first is empty.
            starts = [number * (number + 1) // 2 for number in range(size + 1)]
            whole = 3 + 2 * torch.randn(starts[-1] + 2, *shape, generator=random).double()
            starts[-1] += 2
            weights = torch.randn(whole.shape, generator=random).double()
            compare(plain, ours, whole, weights, slice(starts[rank], starts[rank + 1]))
        ours.eval()
        plain.eval()
        if rank == 0 and plain.track_running_stats:  # on one rank alone
            torch.testing.assert_close(ours(whole), plain(whole))


def compare(plain: nn.Module, ours: nn.Module, whole: Tensor, weights: Tensor, own: slice) -> None:
    one, other = whole[own].clone().requires_grad_(), whole.clone().requires_grad_()
    output, expected = ours(one), plain(other)
    torch.testing.assert_close(output, expected[own])
    (output * weights[own]).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(one.grad, other.grad[own])
    for own_value, other_value in zip(ours.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(own_value.grad)
        torch.testing.assert_close(own_value.grad, other_value.grad)
        own_value.grad = other_value.grad = None
    for own_value, other_value in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own_value, other_value)


def train_with_sync_batch_norm() -> None:
    """Compare training steps of a model with the layer to those of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(80, 3))
    plain.double()
    ours = SyncBatchNorm.convert_sync_batchnorm(plain)
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(80, 3))
    plain.double()
    model = SharedDataParallel(ours)
    optimizers = model.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        inputs = torch.randn(4 * size, 2, 6, 6, dtype=torch.float64)
        dist.broadcast(inputs, 0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs[rank::size]).square().mean().backward()
        plain(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other)


class Heads(nn.Module):
    """Heads behind layers that communicate in backward; a call uses some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Tanh()) for _ in range(3))
        )
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Conv1d(24, 60, 1), nn.Flatten(), nn.Linear(60, 400), nn.Linear(400, 3))
            for _ in range(3)
        )

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        hidden = self.layers(inputs)[:, :, None]
        return torch.stack([self.heads[number](hidden) for number in used]).sum(0)


def train_with_unused_heads(seed: int, cores: int) -> None:
    """Gradients become ready in different orders, or not at all, between those collectives."""
    torch.set_num_threads(1)
    os.sched_getaffinity = lambda _: set(range(cores))  # type: ignore[assignment]
    torch.manual_seed(seed)
    replica = SyncBatchNorm.convert_sync_batchnorm(Heads())
    model = SharedDataParallel(copy.deepcopy(replica), bucket_bytes=BUCKET)
    optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
    plain = torch.optim.Adam(replica.parameters(), lr=0.01)
    rank = dist.get_rank()
    random = seeded(seed + rank)
    for step in range(8):
        used = [[rank % 3], [0] if rank else [2, 1], [1, 0, 2], [2] if rank else [0, 2]][step % 4]
        inputs = torch.randn(4, 24, generator=random)
        for module, one in ((model, optimizer), (replica, plain)):
            one.zero_grad()
            module(inputs, used).square().mean().backward()
        average(replica)
        assert_same_gradients(model, replica)
        optimizer.step()
        plain.step()


def assert_same_gradients(model: nn.Module, replica: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), replica.parameters(), strict=True):
        assert same(one.grad, other.grad), name


class SumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def train_with_collectives_in_backward(seed: int) -> str:
    """Train with and without `collective_backward`; return the error of the latter."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    replica = Heads()
    replica.layers = nn.Sequential(nn.Linear(24, 24), nn.Tanh())
    replica.layers.register_forward_hook(lambda *args: SumInBackward.apply(args[-1]))
    configured = SharedDataParallel(
        copy.deepcopy(replica), bucket_bytes=BUCKET, collective_backward=True
    )
    rank = dist.get_rank()
    inputs = torch.randn(4, 24, generator=seeded(seed + rank))
    for module in (configured, replica):
        module(inputs, [2 - rank]).square().mean().backward()
    average(replica)
    assert_same_gradients(configured, replica)
    unconfigured = SharedDataParallel(replica, bucket_bytes=BUCKET)
    with pytest.raises(CollectiveMismatch, match="different orders") as caught:
        unconfigured(inputs, [2 - rank]).square().mean().backward()
    return str(caught.value)


def train_with_weighted_loss(seed: int) -> None:
    """Batches of different sizes: the averaged gradients are those of the whole batch."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    inputs = torch.randn(7, 4, dtype=torch.float64)
    size = dist.get_world_size()
    own = [*inputs.tensor_split([4] if size == 2 else [4, 6])][dist.get_rank()]
    weight = len(own) / len(inputs)
    plain(inputs).square().mean().backward()
    (model(own).square().mean() * (weight * size)).backward()
    average_gradients(model)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for function in (average_gradients, average_gradients_per_parameter):
        with pytest.raises(UsageError, match=r"weight .* SyncBatchNorm.*weight the loss instead"):
            function(model, weight=weight)


def check_errors() -> None:
    layer = SyncBatchNorm(3)
    with pytest.raises(ValueError, match="expected 3 channels"):
        layer(torch.zeros(2, 4))
    with pytest.raises(UsageError, match="1 values per channel on all ranks together"):
        layer(torch.zeros(1 - dist.get_rank(), 3))
    layer(torch.zeros(1, 3))


def test_equals_batch_norm_on_whole_batch(ranks: RankServer) -> None:
    seed = int(torch.randint(2**20, ()))
    print(f"seed {seed}")
    for size in (2, 3):
        ranks.run(size, check, seed)


def test_training_equals_one_process(ranks: RankServer) -> None:
    ranks.run(2, train_with_sync_batch_norm)


@pytest.mark.parametrize("cores", [1, 64])
def test_ranks_may_leave_out_parameters(ranks: RankServer, cores: int, seed: int) -> None:
    ranks.run(3, train_with_unused_heads, seed, cores)


def test_module_with_other_collectives_in_backward(ranks: RankServer, seed: int) -> None:
    messages = ranks.run(2, train_with_collectives_in_backward, seed)
    assert any("give collective_backward=True" in message for message in messages)


def test_weighted_loss(ranks: RankServer, seed: int) -> None:
    for size in (2, 3):
        ranks.run(size, train_with_weighted_loss, seed)


def test_invalid_input(ranks: RankServer) -> None:
    ranks.run(2, check_errors)
