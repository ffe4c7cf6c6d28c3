"""Many ranks on few cores, and many groups in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx import _native
from tests.fault_injection.leaks import measure_resources, settled_resources
from tests.ranks import RankServer


def operations() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (3, 40_000):
        tensor = torch.full((count,), rank, dtype=torch.int64)
        dist.all_reduce(tensor)
        assert (tensor == size * (size - 1) // 2).all()
        output = torch.empty(size, count, dtype=torch.int64)
        dist.all_to_all_single(output, torch.full((size, count), rank))
        assert torch.equal(output, torch.arange(size)[:, None].expand(size, count))
        received = torch.empty(count, dtype=torch.int64)
        sent = dist.isend(torch.full((count,), rank), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        assert (received == (rank - 1) % size).all()
        sent.wait()


def test_eight_ranks(ranks: RankServer) -> None:
    ranks.run(8, operations)


def test_sixteen_ranks(ranks: RankServer) -> None:
    ranks.run(16, operations)


def use(group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(10), group=group)
    dist.all_reduce(torch.ones(100_000), group=group, async_op=True).wait()
    sent = dist.isend(torch.ones(5), (rank + 1) % size, group=group)
    dist.irecv(torch.ones(5), (rank - 1) % size, group=group).wait()
    sent.wait()


def make_and_destroy(count: int) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    use(group)
    dist.destroy_process_group(group)
    before = settled_resources(None)
    for _ in range(count):
        group = dist.new_group(list(range(dist.get_world_size())))
        use(group)
        dist.destroy_process_group(group)
    assert not settled_resources(before).exceeds(before)


def test_two_hundred_groups_one_after_another(ranks: RankServer) -> None:
    ranks.run(2, make_and_destroy, 200)


def make_and_keep(count: int) -> None:
    everyone = list(range(dist.get_world_size()))
    before = settled_resources(None)
    groups = [dist.new_group(everyone) for _ in range(count)]
    for group in groups:
        dist.barrier(group)
    now = measure_resources()
    # A group used only in the caller's thread needs neither a descriptor nor a thread.
    assert now.descriptors <= before.descriptors + 2
    assert now.threads == before.threads
    assert now.segments == before.segments + count
    for group in groups:
        dist.destroy_process_group(group)
    ended = replace(before, descriptors=now.descriptors)
    assert not settled_resources(ended).exceeds(ended)


def test_two_hundred_groups_at_once(ranks: RankServer) -> None:
    ranks.run(4, make_and_keep, 200)


def resident() -> int:
    """Return the bytes of shared memory that this process has touched."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no RssShmem")


def memory_of_a_group() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    idle = resident()
    dist.all_reduce(torch.ones(3_000_000))
    for peer in range(size):
        if peer != rank:
            works = [
                dist.isend(torch.ones(1_000_000), peer),
                dist.irecv(torch.ones(1_000_000), peer),
            ]
            for work in works:
                work.wait()
    dist.barrier()
    return idle, resident()


def test_memory_of_a_group_is_as_documented(ranks: RankServer) -> None:
    size = 4
    for idle, used in ranks.run(size, memory_of_a_group):
        # Per rank: control and inline buffers from the start; staging and rings when first used.
        assert idle <= size * 64 * 2**10 + 2**16
        assert used <= size * (2 * 2**20 + 2**16) + size * size * (2**18 + 2**13)
        assert used <= _native.segment_bytes(size)


LONGEST = 10.0
"""Seconds that one step of any rank may take under load; a test of device meshes once took 20."""


def waves_of_groups(waves: int, count: int) -> float:
    """Form groups, use all at once and leave them; return the longest step in seconds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    longest = 0.0

    def timed(step: Callable[[], Any]) -> Any:
        nonlocal longest
        start = time.monotonic()
        result = step()
        longest = max(longest, time.monotonic() - start)
        return result

    for _ in range(waves):
        groups = [timed(dist.new_group) for _ in range(count)]
        tensors = [torch.ones(5_000) for _ in groups]
        works = [
            timed(partial(dist.all_reduce, tensor, group=group, async_op=True))
            for tensor, group in zip(tensors, groups, strict=True)
        ]
        for group in groups[::4]:
            messages = torch.empty(100_000), torch.ones(100_000)
            works.append(dist.irecv(messages[0], (rank - 1) % size, group=group))
            works.append(dist.isend(messages[1], (rank + 1) % size, group=group))
        for work in works:
            timed(work.wait)
        assert all(tensor.eq(size).all() for tensor in tensors)
        for group in groups:
            timed(partial(dist.destroy_process_group, group))
    return longest


def test_groups_formed_and_left_at_once_do_not_stall(ranks: RankServer) -> None:
    assert max(ranks.run(8, waves_of_groups, 2, 32, timeout=60.0)) < LONGEST
