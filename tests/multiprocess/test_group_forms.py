"""Groups as used by libraries: calls without options, and queries of a group's properties."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.errors import CollectiveTimeout
from tests.ranks import RankServer


def world() -> Any:
    return dist.group.WORLD


def called_without_options() -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), world()
    own = torch.full((3,), float(rank + 1))
    total = size * (size + 1) / 2

    tensor = own.clone()
    group.allreduce(tensor).wait()
    assert (tensor == total).all()
    tensor = own.clone()
    group.allreduce([tensor], dist.ReduceOp.MAX, timedelta(seconds=5)).wait()
    assert (tensor == size).all()
    tensor = own.clone()
    group.broadcast(tensor, 1).wait()
    assert (tensor == 2).all()
    tensor = own.clone()
    group.reduce(tensor, 1).wait()
    assert (tensor == (total if rank == 1 else rank + 1)).all()

    gathered = [torch.zeros(3) for _ in range(size)]
    group.allgather(gathered, own).wait()
    assert [part[0].item() for part in gathered] == [r + 1.0 for r in range(size)]
    gathered = [torch.zeros(3) for _ in range(size)]
    group.gather(gathered if rank == 1 else [], own, 1).wait()
    assert rank != 1 or [part[0].item() for part in gathered] == [r + 1.0 for r in range(size)]
    parts = [torch.full((3,), 10.0 * r) for r in range(size)]
    group.scatter(tensor, parts if rank == 1 else [], 1).wait()
    assert (tensor == 10 * rank).all()
    group.reduce_scatter(tensor, parts).wait()
    assert (tensor == size * 10 * rank).all()
    group.alltoall(gathered, parts).wait()
    assert all((part == 10 * rank).all() for part in gathered)
    group.barrier().wait()


def test_methods_accept_the_forms_of_pytorch(ranks: RankServer) -> None:
    ranks.run(2, called_without_options)
    ranks.run(3, called_without_options)


def query_properties() -> None:
    group = world()
    assert torch.device("cpu") in group._device_types
    assert c10d._get_object_coll_device(group) == "cpu"
    assert not group._get_backend(torch.device("cpu")).supports_splitting
    assert not group._has_hooks()
    before = group._get_sequence_number_for_group()
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(5)]
    group._wait_for_pending_works()
    assert all(work.is_completed() for work in works)
    assert group._get_sequence_number_for_group() == before + 5
    group.get_group_store().set(f"from {dist.get_rank()}", "here")
    assert group.get_group_store().get("from 0") == b"here"


def test_properties(ranks: RankServer) -> None:
    ranks.run(2, query_properties)


def call_name_dependent_functions() -> None:
    """Call functions of PyTorch that check for Gloo's name or class: each works as on Gloo."""
    dist.monitored_barrier(timeout=timedelta(seconds=5))
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo)
    c10d._set_pg_timeout(timedelta(seconds=0.3), world())
    c10d._set_pg_timeout(timedelta(seconds=30), gloo)
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=r"timeout of 0\.3 s"):
            dist.barrier()
        assert time.monotonic() - start > 0.2
    dist.barrier(gloo)


def test_functions_that_reject_other_backends(ranks: RankServer) -> None:
    ranks.run(2, call_name_dependent_functions)


def coalesced_messages() -> None:
    rank, device = dist.get_rank(), torch.device("cpu")
    received = [torch.zeros(4), torch.zeros(2**20)]
    with dist._coalescing_manager(world(), device, async_ops=True) as manager:
        for tensor in received:
            dist.isend(torch.full_like(tensor, rank + 1.0), 1 - rank)
        for tensor in received:
            dist.irecv(tensor, 1 - rank)
    manager.wait()
    assert all((tensor == 2 - rank).all() for tensor in received)


def test_messages_are_coalesced(ranks: RankServer) -> None:
    ranks.run(2, coalesced_messages)
