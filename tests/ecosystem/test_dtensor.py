"""DTensor, device meshes and tensor parallelism equal the same arithmetic in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ecosystem.oracle import fresh, mesh_of, new_model
from tests.ranks import RankServer

PRELOAD = ("torch.distributed.tensor.parallel",)


def redistribution(seed: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh, whole = mesh_of(size), fresh(seed, 10, 6)  # 10 rows: uneven over 3 and 4 ranks
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    for placement in (Shard(1), Replicate(), Shard(1), Shard(0), Replicate(), Shard(0)):
        tensor = tensor.redistribute(mesh, [placement])
        assert torch.equal(tensor.full_tensor(), whole)
    for operator, scale in (("sum", size), ("avg", 1)):
        partial = DTensor.from_local(whole, mesh, [Partial(operator)])
        for placement in (Shard(0), Shard(1), Replicate()):
            total = partial.redistribute(mesh, [placement]).full_tensor()
            torch.testing.assert_close(total, scale * whole)
    other = distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)])
    torch.testing.assert_close((tensor @ other).full_tensor(), whole @ whole.t())


def two_dimensions(seed: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(2, 2, names=("data", "model"))
    whole = fresh(seed, 8, 6)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(tensor.full_tensor(), whole)
    for placements in ([Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(0)]):
        assert torch.equal(tensor.redistribute(mesh, placements).full_tensor(), whole)
    for name in ("data", "model"):
        group = mesh[name].get_group()
        assert group.size() == 2
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [2.0] * 3
    flat = mesh["data", "model"]._flatten("all")
    assert flat.size() == 4


def tensor_parallel(seed: int) -> None:
    """Check forward, loss and gradients, plain and with the sequence sharded between the layers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plans = (
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        },
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    for sequence, plan in enumerate(plans):
        model, alone = new_model(seed), new_model(seed)
        parallelize_module(model, mesh_of(size), plan)
        rows = fresh(seed + 9, 4 * size, 10)
        result = model(rows.chunk(size)[rank] if sequence else rows)
        if sequence:
            result = result.redistribute(placements=[Replicate()]).to_local()
        expected: Tensor = alone(rows)
        torch.testing.assert_close(result, expected)
        nn.functional.mse_loss(result, torch.ones_like(result)).backward()
        nn.functional.mse_loss(expected, torch.ones_like(expected)).backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def parallel_loss(seed: int) -> None:
    """Compute the cross entropy of sharded logits."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    size = dist.get_world_size()
    whole, labels = fresh(seed, 6, 4 * size), torch.arange(6) % (4 * size)
    mesh = mesh_of(size)
    logits = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
    targets = distribute_tensor(labels, mesh, [Replicate()])
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, targets)
        loss.backward()
    alone = whole.clone().requires_grad_()
    expected = nn.functional.cross_entropy(alone, labels)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(logits.grad.full_tensor(), alone.grad)


@pytest.mark.parametrize(
    ("check", "world_size"),
    [(redistribution, 3), (two_dimensions, 4), (tensor_parallel, 3), (parallel_loss, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dtensor(
    ranks: RankServer, seed: int, check: Callable[[int], None], world_size: int
) -> None:
    ranks.run(world_size, check, seed)
