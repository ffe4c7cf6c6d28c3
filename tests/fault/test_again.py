"""After a failure the same processes form groups anew: all of them, or those that are left."""

from __future__ import annotations

import os
import signal
import time
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


def works(group: Any = None) -> None:
    """All is well in a group: a collective, an asynchronous one and messages."""
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
    dist.barrier(group)  # who goes on breaks the group


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


def half_done(group: Any) -> None:
    """Works and messages that never end are under way when the group is left."""
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
    "in the middle": (half_done, 20),
}


def again_and_again(name: str, in_sub_group: bool) -> None:
    """Twenty groups, of which each works and then fails; nothing of them stays."""
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
        works(group)
        group.set_timeout(timedelta(seconds=seconds))
        fail(group)
        dist.destroy_process_group(group)
        del group
        now = settled_resources(first)
        if turn == 1:
            first = now
        assert now.exceeds(first) == [], (turn, first, now)
    if in_sub_group:
        works()
        dist.destroy_process_group()


@pytest.mark.parametrize("in_sub_group", (False, True))
@pytest.mark.parametrize("name", FAILURES)
def test_again_and_again(ranks: RankServer, name: str, in_sub_group: bool) -> None:
    ranks.run(3, again_and_again, name, in_sub_group, timeout=None)


def reduce_until_death(group: Any, async_op: bool) -> None:
    while True:
        work = dist.all_reduce(torch.zeros(9), group=group, async_op=async_op)
        if work is not None:
            work.wait()


def fewer_and_fewer(how: str) -> list[str]:
    """In each round the last rank dies in the middle; the others go on without it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told, first = [], None
    while size > 1:
        form(f"of-{size}", rank, size)
        odd = dist.new_group(range(1, size)) if how == "in a sub-group" and size > 2 else None
        works()
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
    works()
    return told


@pytest.mark.parametrize("how", ("blocking", "work", "in a sub-group"))
def test_survivors_form_smaller_groups(ranks: RankServer, how: str) -> None:
    size = 6
    ended = ranks.start(size, fewer_and_fewer, how, timeout=None).join()
    assert [rank.code for rank in ended] == [0] + [-signal.SIGKILL] * (size - 1), ended[0].report()
    told = ended[0].value
    assert len(told) == size - 1
    for victim, text in zip(range(size - 1, 0, -1), told, strict=True):
        assert f"rank {victim} (pid {ended[victim].pid})" in text


def replaced() -> list[int]:
    """One rank dies, and another process comes in its place."""
    place, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    sums = []
    if place < size:
        form("first", place, size)
        works()
        if place == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            reduce_until_death(None, async_op=False)
        dist.destroy_process_group()
    form("second", 1 if place == size else place, size)
    works()
    tensor = torch.tensor([place])
    dist.all_reduce(tensor)
    sums.append(int(tensor.item()))
    return sums


def test_a_new_process_in_the_place_of_the_dead(ranks: RankServer) -> None:
    ended = ranks.start(4, replaced, timeout=None).join()
    assert ended[1].code == -signal.SIGKILL
    assert [ended[rank].value for rank in (0, 2, 3)] == [[5]] * 3


def at_one_address() -> None:
    """The address of a store stays the same, as under torchrun; a prefix tells the groups apart."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['FOLDER']}/store", size)  # type: ignore[attr-defined]
    for turn in range(5):
        dist.init_process_group(
            "phalanx",
            store=dist.PrefixStore(f"turn-{turn}", store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
        )
        works()
        start = time.monotonic()
        mismatch(dist.group.WORLD)
        dist.destroy_process_group()
        assert time.monotonic() - start < 2


def test_at_one_address(ranks: RankServer) -> None:
    ranks.run(3, at_one_address, timeout=None)
