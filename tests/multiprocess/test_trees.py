"""Groups whose ranks meet over a tree, as on machines with many caches.

`make trees` runs all of `tests/conformance` over trees.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from phalanx.topology import places
from tests.ranks import (
    RankOutcome,
    RankServer,
    marker_file,
    place_ranks_apart,
    run_in_group,
    wait_for_file,
)
from tests.seeds import fresh_seed

# Ranks 1, 2 and 4 are below rank 0; 3 is below 2; 6 is below 4, and 5 and 7 below these.
SIZE = 8


def in_tree(timeout: float, function: Callable[..., object], *arguments: object) -> object:
    place_ranks_apart()
    return run_in_group(timeout, function, *arguments)


def outcomes(
    ranks: RankServer,
    size: int,
    function: Callable[..., object],
    *arguments: Any,
    seconds: float = 20.0,
) -> list[RankOutcome]:
    return ranks.start(size, in_tree, seconds, function, *arguments, timeout=None).join()


def native_group(group: dist.ProcessGroup | None = None) -> Any:
    backend: Any = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return backend._membership.native


def has_tree(group: dist.ProcessGroup | None = None) -> bool:
    return native_group(group).has_tree


def reduce_in_many_ways(dtype: torch.dtype) -> bool:
    """Return whether sums over the tree have the bits of a flat group, and the values of Gloo.

    In the group of eight, the largest go from cache to cache unless they are 16-bit floats.
    """
    gloo = dist.new_group(backend="gloo")
    places.MIN_RANKS = 1000
    flat = dist.new_group(backend="phalanx")
    assert has_tree()
    assert not has_tree(flat)
    assert native_group().caches == ([0, 2, 4, 6] if dist.get_world_size() == SIZE else [])
    assert native_group(flat).caches == []
    generator = torch.Generator().manual_seed(fresh_seed() + dist.get_rank())
    for count in (0, 1, 6, 7, 200, 511, 513, 1024, 1025, 4096, 5000, 40_000, 600_001):
        data = torch.rand(count, generator=generator, dtype=torch.float64).mul(100).to(dtype)
        over_tree, over_flat, right = data.clone(), data.clone(), data.double()
        dist.all_reduce(over_tree)
        dist.all_reduce(over_flat, group=flat)
        dist.all_reduce(right, group=gloo)
        assert torch.equal(over_tree, over_flat), count
        root = count % dist.get_world_size()
        to_root, to_flat_root = data.clone(), data.clone()
        dist.reduce(to_root, root)
        dist.reduce(to_flat_root, root, group=flat)
        assert torch.equal(to_root, over_flat if dist.get_rank() == root else data), count
        assert torch.equal(to_flat_root, to_root), count
        error = 0.0 if not dtype.is_floating_point else torch.finfo(dtype).eps * SIZE
        torch.testing.assert_close(over_tree.double(), right, rtol=error, atol=0)
    return True


@pytest.mark.parametrize("size", [3, 5, SIZE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_sums_are_those_of_a_flat_group(ranks: RankServer, size: int, dtype: torch.dtype) -> None:
    assert all(each.value for each in outcomes(ranks, size, reduce_in_many_ways, dtype))


def mix_operations() -> list[float]:
    """Operations that meet over the tree between others that don't, and averages of each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    prepared = torch.empty(100)
    plan = phalanx.plan([phalanx.prepare(dist.all_reduce, prepared), phalanx.prepare(dist.barrier)])
    results = []
    for step in range(200):
        average = torch.full((3 + step,), float(rank))
        dist.all_reduce(average, dist.ReduceOp.AVG)
        root = step % size
        tensor = torch.full((step,), float(rank))
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, torch.full((step,), float(root)))
        work = dist.barrier(async_op=True)
        prepared.fill_(step)
        plan()
        assert torch.equal(prepared, torch.full((100,), float(step * size)))
        work.wait()
        results.append(average.mean().item())
    return results


def test_operations_of_all_kinds_follow_each_other(ranks: RankServer) -> None:
    for each in outcomes(ranks, SIZE, mix_operations):
        assert each.value == [(SIZE - 1) / 2] * 200


def reduce_in_sub_groups() -> list[float]:
    rank = dist.get_rank()
    low, high = dist.new_group([0, 1, 2, 4]), dist.new_group([3, 5, 6, 7])
    own = low if rank in (0, 1, 2, 4) else high
    assert has_tree(own)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=own)
    return [total.item()]


def test_sub_groups_have_trees_of_their_own(ranks: RankServer) -> None:
    found = [each.value for each in outcomes(ranks, SIZE, reduce_in_sub_groups)]
    assert found == [[7.0] if rank in (0, 1, 2, 4) else [21.0] for rank in range(SIZE)]


def leave_one_out(missing: int) -> None:
    dist.barrier()
    if dist.get_rank() == missing:
        wait_for_file("end", 40.0)
        return
    try:
        dist.all_reduce(torch.ones(2))
    finally:
        marker_file(f"failed{dist.get_rank()}").touch()
        if all(marker_file(f"failed{rank}").exists() for rank in range(SIZE) if rank != missing):
            marker_file("end").touch()


@pytest.mark.parametrize("missing", [0, 2, 5, 7])
def test_a_missing_rank_is_named_by_all(ranks: RankServer, missing: int) -> None:
    for each in outcomes(ranks, SIZE, leave_one_out, missing, seconds=2.0):
        if each.rank != missing:
            assert isinstance(each.error, CollectiveTimeout), each.report()
            assert each.error.ranks == (missing,), str(each.error)


def die(victim: int) -> None:
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("victim", [0, 4, 7])
def test_a_killed_rank_is_named_by_all(ranks: RankServer, victim: int) -> None:
    for each in outcomes(ranks, SIZE, die, victim):
        if each.rank != victim:
            assert isinstance(each.error, PeerLost), each.report()
            assert each.error.ranks == (victim,)


def disagree(other: int) -> None:
    dist.barrier()
    if dist.get_rank() == other:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("other", [0, 4, 7])
def test_a_rank_in_another_operation_is_named_by_all(ranks: RankServer, other: int) -> None:
    for each in outcomes(ranks, SIZE, disagree, other):
        assert isinstance(each.error, CollectiveMismatch), each.report()
        assert other in each.error.ranks, str(each.error)
