"""After a failure, all processes or the survivors form new groups."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import (
    Aborted,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    PhalanxError,
)
from tests.fault_injection.leaks import Resources, settled_resources
from tests.ranks import RankServer

ROUNDS = 20


def form(name: str, rank: int, size: int, seconds: float = 20.0) -> None:
    """Form the default group; each has a store of its own."""
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/{name}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def check_group(group: Any = None) -> None:
    """Check a group with a collective, an asynchronous one and messages."""
    group = dist.group.WORLD if group is None else group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensor = torch.full((5000,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    assert (tensor == size * (size + 1) / 2).all()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    if size > 1:
        peers = dist.get_process_group_ranks(group)
        got = torch.zeros(1)
        exchange = [
            dist.isend(torch.full((1,), float(rank)), peers[(rank + 1) % size], group),
            dist.irecv(got, peers[(rank - 1) % size], group),
        ]
        for message in exchange:
            message.wait()
        assert got.item() == (rank - 1) % size
    dist.barrier(group)  # an operation would break the group


def timeout(group: Any) -> None:
    if dist.get_rank() != 0:
        with pytest.raises(CollectiveTimeout):
            dist.all_reduce(torch.zeros(3), group=group, async_op=dist.get_rank() == 1).wait()
    else:
        with pytest.raises(CollectiveTimeout):
            dist.recv(torch.zeros(1), 1, group)


def mismatch(group: Any) -> None:
    with pytest.raises(CollectiveMismatch):
        dist.all_reduce(torch.zeros(3 + dist.get_rank()), group=group)


def aborted(group: Any) -> None:
    if dist.get_rank() == 1:
        phalanx.abort(group, "enough")
    else:
        with pytest.raises(Aborted, match="enough"):
            dist.all_reduce(torch.zeros(3), group=group)


def pytorch_aborted(group: Any) -> None:
    if dist.get_rank() == 1:
        group.abort()
    else:
        with pytest.raises(Aborted, match="aborted by rank 1"):
            dist.barrier(group, async_op=True).get_future().wait()


def leave_with_pending_operations(group: Any) -> None:
    """Leave the group with works and messages in progress that never end."""
    dist.irecv(torch.zeros(3), (dist.get_rank() + 1) % dist.get_world_size(), group, 9)
    if dist.get_rank() == 0:
        phalanx.abort(group)
    with suppress(PhalanxError, ValueError):
        dist.all_reduce(torch.zeros(10), group=group, async_op=True).wait()


FAILURES: dict[str, tuple[Callable[[Any], None], float]] = {
    "timeout": (timeout, 0.1),
    "mismatch": (mismatch, 20),
    "phalanx.abort": (aborted, 20),
    "PyTorch's abort": (pytorch_aborted, 20),
    "in the middle": (leave_with_pending_operations, 20),
}


def fail_and_form_repeatedly(name: str, in_sub_group: bool) -> None:
    """Form twenty groups, each of which works and then fails; none leaves resources behind."""
    fail, seconds = FAILURES[name]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first: Resources | None = None
    if in_sub_group:
        form("world", rank, size)
    for turn in range(ROUNDS):
        if in_sub_group:
            group: Any = dist.new_group(timeout=timedelta(seconds=10))
        else:
            form(f"turn-{turn}", rank, size, 10)
            group = dist.group.WORLD
        check_group(group)
        group.set_timeout(timedelta(seconds=seconds))
        fail(group)
        dist.destroy_process_group(group)
        del group
        now = settled_resources(first)
        if turn == 1:
            first = now
        assert now.exceeds(first) == [], (turn, first, now)
    if in_sub_group:
        check_group()
        dist.destroy_process_group()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("in_sub_group", (False, True))
@pytest.mark.parametrize("name", FAILURES)
def test_repeated_failures(ranks: RankServer, name: str, in_sub_group: bool) -> None:
    ranks.run(3, fail_and_form_repeatedly, name, in_sub_group, timeout=None)


def reduce_until_death(group: Any, async_op: bool) -> None:
    while True:
        work = dist.all_reduce(torch.zeros(9), group=group, async_op=async_op)
        if work is not None:
            work.wait()


def shrink_group(how: str) -> list[str]:
    """In each round the last rank dies in an operation; the others continue without it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told, first = [], None
    while size > 1:
        form(f"of-{size}", rank, size)
        odd = dist.new_group(range(1, size)) if how == "in a sub-group" and size > 2 else None
        check_group()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            reduce_until_death(None if rank == 0 else odd, async_op=how == "work")
        told.append(str(caught.value))
        del caught
        dist.destroy_process_group()
        odd = None
        size -= 1
        now = settled_resources(first)
        first = first or now
        assert now.exceeds(first) == [], (size, first, now)
    form("of-1", 0, 1)
    check_group()
    return told


@pytest.mark.parametrize("how", ("blocking", "work", "in a sub-group"))
def test_survivors_form_smaller_groups(ranks: RankServer, how: str) -> None:
    size = 6
    ended = ranks.start(size, shrink_group, how, timeout=None).join()
    assert [rank.code for rank in ended] == [0] + [-signal.SIGKILL] * (size - 1), ended[0].report()
    told = ended[0].value
    assert len(told) == size - 1
    for victim, text in zip(range(size - 1, 0, -1), told, strict=True):
        assert f"rank {victim} (pid {ended[victim].pid})" in text


def replace_dead_rank() -> list[int]:
    """One rank dies, and another process replaces it."""
    place, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    sums = []
    if place < size:
        form("first", place, size)
        check_group()
        if place == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            reduce_until_death(None, async_op=False)
        dist.destroy_process_group()
    form("second", 1 if place == size else place, size)
    check_group()
    tensor = torch.tensor([place])
    dist.all_reduce(tensor)
    sums.append(int(tensor.item()))
    return sums


def test_new_process_replaces_a_dead_rank(ranks: RankServer) -> None:
    ended = ranks.start(4, replace_dead_rank, timeout=None).join()
    assert ended[1].code == -signal.SIGKILL
    assert [ended[rank].value for rank in (0, 2, 3)] == [[5]] * 3


def form_at_one_address() -> None:
    """The address of the store stays the same, as under torchrun; prefixes separate the groups."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['FOLDER']}/store", size)  # type: ignore[attr-defined]
    for turn in range(5):
        dist.init_process_group(
            "phalanx",
            store=dist.PrefixStore(f"turn-{turn}", store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
        )
        check_group()
        mismatch(dist.group.WORLD)
        dist.destroy_process_group()


def test_at_one_address(ranks: RankServer) -> None:
    ranks.run(3, form_at_one_address, timeout=None)
