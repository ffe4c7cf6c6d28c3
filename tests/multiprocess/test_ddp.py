"""PyTorch's DistributedDataParallel on the backend equals training in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import RankServer

STEPS = 3
BATCH = 12


def new_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)]
    return nn.Sequential(*layers).double()


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + step)
    inputs = torch.randn(BATCH, 20, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)


def train(model: nn.Module, seed: int, rank: int, world_size: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = (part[rank::world_size] for part in batch(seed, step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def compare(bucket_mb: float, as_view: bool, seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = train(new_model(), seed, 0, 1)
    model = new_model()
    if rank != 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank)  # DDP brings rank 0's
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=as_view
    )
    for one, other in zip(train(wrapped, seed, rank, world_size), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.fixture(autouse=True)
def preloaded(ranks: RankServer) -> None:
    """The first step of an optimizer imports it."""
    ranks.preload("torch._dynamo")


# The small bucket makes several all-reduces that overlap with backward.
@pytest.mark.parametrize(
    ("world_size", "as_view", "bucket_mb"),
    [(1, False, 25), (2, False, 0.01), (2, True, 25), (3, True, 0.01), (4, False, 0.01)],
)
def test_equals_one_process(
    ranks: RankServer, world_size: int, as_view: bool, bucket_mb: float
) -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    ranks.run(world_size, compare, bucket_mb, as_view, seed)


def with_buffers_and_unused() -> None:
    """BatchNorm's buffers are broadcast, an unused parameter is found, no_sync accumulates."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.used(self.norm(inputs))
            return result

    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for _ in range(2):
        with model.no_sync():
            model(torch.randn(5, 4)).sum().backward()
        model(torch.randn(5, 4)).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) >= 4
    for tensor in [*grads, *(p.detach() for p in model.parameters())]:
        others = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor)
        assert all(torch.equal(other, tensor) for other in others)


def test_buffers_unused_parameters_and_no_sync(ranks: RankServer) -> None:
    ranks.run(2, with_buffers_and_unused)
