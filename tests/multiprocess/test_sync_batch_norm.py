"""`SyncBatchNorm` on the CPU against BatchNorm on the whole batch, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.parallel import DataParallel, SyncBatchNorm
from tests.ranks import RankServer

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
    for (shape, kind), options in [
        (p, o) for p in zip(SHAPES, PLAIN, strict=True) for o in OPTIONS
    ]:
        plain = kind(shape[0], dtype=torch.float64, **options)
        ours = SyncBatchNorm.convert_sync_batchnorm(kind(shape[0], dtype=torch.float64, **options))
        assert type(ours) is SyncBatchNorm
        if plain.affine:
            with torch.no_grad():
                plain.weight.normal_(generator=random)
                plain.bias.normal_(generator=random)
        ours.load_state_dict(plain.state_dict())
        for _ in range(2):
            # Ranks have batches of different sizes: the first none.
            starts = [number * (number + 1) // 2 for number in range(size + 1)]
            whole = 3 + 2 * torch.randn(starts[-1] + 2, *shape, generator=random).double()
            starts[-1] += 2
            along = torch.randn(whole.shape, generator=random).double()
            compare(plain, ours, whole, along, slice(starts[rank], starts[rank + 1]))
        ours.eval()
        plain.eval()
        if rank == 0 and plain.track_running_stats:  # nobody else comes
            torch.testing.assert_close(ours(whole), plain(whole))


def compare(plain: nn.Module, ours: nn.Module, whole: Tensor, along: Tensor, own: slice) -> None:
    one, other = whole[own].clone().requires_grad_(), whole.clone().requires_grad_()
    output, expected = ours(one), plain(other)
    torch.testing.assert_close(output, expected[own])
    (output * along[own]).sum().backward()
    (expected * along).sum().backward()
    torch.testing.assert_close(one.grad, other.grad[own])
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, theirs.grad)
        mine.grad = theirs.grad = None
    for mine, theirs in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def in_training() -> None:
    """A whole step of a model with it equals that of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(80, 3))
    plain.double()
    ours = SyncBatchNorm.convert_sync_batchnorm(plain)
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(80, 3))
    plain.double()
    model = DataParallel(ours)
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


def errors() -> None:
    layer = SyncBatchNorm(3)
    with pytest.raises(ValueError, match="expected 3 channels"):
        layer(torch.zeros(2, 4))
    with pytest.raises(UsageError, match="1 values per channel on all ranks together"):
        layer(torch.zeros(1 - dist.get_rank(), 3))
    layer(torch.zeros(1, 3))


def test_equals_batch_norm_on_the_whole_batch(ranks: RankServer) -> None:
    seed = int(torch.randint(2**20, ()))
    print(f"seed {seed}")
    for size in (2, 3):
        ranks.run(size, check, seed)


def test_equals_it_in_training(ranks: RankServer) -> None:
    ranks.run(2, in_training)


def test_bad_input_gets_a_clear_error(ranks: RankServer) -> None:
    ranks.run(2, errors)
