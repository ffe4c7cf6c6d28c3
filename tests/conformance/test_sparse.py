"""all_reduce of sparse tensors, against the sum of dense ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import CollectiveMismatch, UsageError
from tests.ranks import RankServer

# (shape, sparse dimensions)
SHAPES = (((7,), 1), ((5, 3), 1), ((4, 3, 2), 2), ((3, 2, 2, 5), 3))


def sparse(shape: tuple[int, ...], dims: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random entries, some with the same indices; none on rank 1."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    entries = 0 if rank == 1 else 4 + rank
    rows = [torch.randint(0, size, (entries,), generator=generator) for size in shape[:dims]]
    values = torch.randint(-9, 9, (entries, *shape[dims:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(torch.stack(rows), values, shape)


def sums(dtype: torch.dtype, async_op: bool) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for shape, dims in SHAPES:
        tensor = sparse(shape, dims, rank, dtype)
        work = dist.all_reduce(tensor, async_op=async_op)
        if async_op:
            work.wait()
        expected = sum(sparse(shape, dims, peer, dtype).to_dense() for peer in range(size))
        assert tensor.is_sparse
        assert torch.equal(tensor.to_dense(), expected)


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("async_op", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.int64))
def test_sums(ranks: RankServer, size: int, dtype: torch.dtype, async_op: bool) -> None:
    ranks.run(size, sums, dtype, async_op)


def shapes_that_differ() -> None:
    tensor = sparse((5, 3 + dist.get_rank()), 1, dist.get_rank(), torch.float32)
    with pytest.raises(CollectiveMismatch, match=r"differ from rank to rank.*\[1, 5, 4\]"):
        dist.all_reduce(tensor)


def test_shapes_that_differ(ranks: RankServer) -> None:
    ranks.run(2, shapes_that_differ)


def other_operators() -> None:
    tensor = sparse((5, 3), 1, 0, torch.float32)
    with pytest.raises(UsageError, match="sparse tensors can only be summed"):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    dist.all_reduce(tensor)


def test_other_operators(ranks: RankServer) -> None:
    ranks.run(2, other_operators)
