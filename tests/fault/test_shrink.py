"""Groups that go on without the ranks that are lost, in the same processes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.backend import rank_changes
from phalanx.errors import Aborted, PeerLost, PhalanxError, RankExcluded, UsageError
from tests.fault.test_again import check_group
from tests.fault_injection.leaks import settled_resources
from tests.ranks import RankServer, connect_ranks, marker_file, wait_for_file
from tests.waiting import once_blocked, stopped

LIMITS: dict[str, Any] = {"timeout": 60.0}
HOSTS = pytest.mark.parametrize("hosts", ["", "aab", "abc"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_until_lost(group: dist.ProcessGroup | None = None) -> PhalanxError:
    """Run all-reduces until one fails, and return its error."""
    while True:
        try:
            dist.all_reduce(torch.ones(100), group=group)
        except PhalanxError as error:
            return error


def check_numbers(change: phalanx.RankChange, group: dist.ProcessGroup | None = None) -> None:
    """Check that PyTorch has the new numbers, in Python and in C++."""
    assert (dist.get_rank(group), dist.get_world_size(group)) == change[:2]
    target = group or dist.group.WORLD
    assert (target.rank(), target.size()) == change[:2]
    assert len(dist.get_process_group_ranks(group)) == change.world_size
    gathered: list[Any] = [None] * change.world_size
    dist.all_gather_object(gathered, change.former_ranks[change.rank], group=group)
    assert tuple(gathered) == change.former_ranks


# ---- one rank dies ----


def survives(victims: list[int], how: str) -> Any:
    rank, group = dist.get_rank(), dist.group.WORLD
    connect_ranks()
    if rank in victims:
        if how == "exits":
            os._exit(3)
        die()
    error = fail_until_lost()
    assert set(error.ranks) <= set(victims)
    change = phalanx.shrink()
    check_numbers(change)
    assert dist.group.WORLD is group
    assert change.former_ranks[change.rank] == rank
    assert set(change.lost_ranks) == set(victims)
    check_group()
    new = dist.new_group(backend="phalanx")
    check_group(new)
    return dist.get_world_size()


@HOSTS
@pytest.mark.parametrize("how", ["is killed", "exits"])
@pytest.mark.parametrize(
    ("size", "victims"), [(2, [1]), (2, [0]), (3, [0]), (4, [2]), (4, [0, 3]), (5, [0, 1, 2, 4])]
)
def test_survivors_go_on(
    ranks: RankServer, size: int, victims: list[int], how: str, hosts: str
) -> None:
    ended = ranks.start(size, survives, victims, how, hosts=hosts, **LIMITS).join()
    for each in ended:
        if each.rank in victims:
            assert each.code == (3 if how == "exits" else -signal.SIGKILL), each.report()
        else:
            assert each.code == 0, each.report()
            assert each.value == size - len(victims)


def dies_again_and_again() -> int:
    """The highest rank of each round dies, until one is left."""
    rank = dist.get_rank()
    while dist.get_world_size() > 1:
        connect_ranks()
        if dist.get_rank() == dist.get_world_size() - 1:
            die()
        fail_until_lost()
        change = phalanx.shrink()
        assert change.rank == rank
        check_group()
    return rank


@HOSTS
def test_all_but_one_die_in_turn(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(5, dies_again_and_again, hosts=hosts, **LIMITS).join()
    reports = "\n".join(each.report() for each in ended if each.code != -signal.SIGKILL)
    assert [each.code for each in ended] == [0] + 4 * [-signal.SIGKILL], reports


# ---- results against numpy, on the new group ----


def reduces_random_data(seed: int) -> None:
    rank = dist.get_rank()
    connect_ranks()
    if rank == 1:
        die()
    fail_until_lost()
    change = phalanx.shrink()
    for dtype, count in ((torch.float64, 1), (torch.float32, 4097), (torch.int64, 300_000)):
        data = [
            np.random.default_rng((seed, each, count)).integers(-50, 50, count)
            for each in change.former_ranks
        ]
        tensor = torch.from_numpy(data[change.rank].copy()).to(dtype)
        dist.all_reduce(tensor)
        assert (tensor.to(torch.float64).numpy() == np.sum(data, 0)).all()
        outputs = torch.full((change.world_size * count,), 77, dtype=dtype)
        dist.all_gather_into_tensor(outputs, torch.from_numpy(data[change.rank]).to(dtype))
        assert (outputs.to(torch.float64).numpy() == np.concatenate(data)).all()


def test_results_on_the_new_group(ranks: RankServer) -> None:
    seed = random.randrange(2**31)
    ended = ranks.start(4, reduces_random_data, seed, **LIMITS).join()
    for each in ended:
        assert each.code == (-signal.SIGKILL if each.rank == 1 else 0), (seed, each.report())


# ---- sub-groups ----


def shrinks_groups() -> None:
    rank = dist.get_rank()
    whole = dist.new_group([0, 2, 3], backend="phalanx")
    broken = dist.new_group([1, 2, 3], backend="phalanx")
    connect_ranks()
    if rank == 1:
        die()
    fail_until_lost()
    change = phalanx.shrink()
    assert change.former_ranks == (0, 2, 3)
    assert dist.get_process_group_ranks(whole) == [0, 1, 2]
    check_group(whole)
    if rank == 0:
        return
    assert dist.get_process_group_ranks(broken) == [1, 2]
    with pytest.raises(PeerLost):
        dist.all_reduce(torch.ones(3), group=broken)
    change = phalanx.shrink(broken)
    assert (change.former_ranks, change.lost_ranks) == ((1, 2), (0,))
    check_numbers(change, broken)
    check_group(broken)
    assert dist.get_process_group_ranks(broken) == [1, 2]


@HOSTS
def test_members_of_groups_are_renumbered(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(4, shrinks_groups, hosts=hosts, **LIMITS).join()
    for each in ended:
        assert each.code == (-signal.SIGKILL if each.rank == 1 else 0), each.report()


# ---- the store ----


def loses_the_store() -> None:
    """Without a launcher, rank 0 is the host of the store, which its death ends."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        marker_file("unfinished").write_text(str(store.port))
        marker_file("unfinished").rename(marker_file("port"))
    else:
        wait_for_file("port")
        port = int(marker_file("port").read_text())
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=size)
    while dist.get_world_size() > 2:
        connect_ranks()
        if dist.get_rank() == 0:
            die()
        fail_until_lost()
        phalanx.shrink()
        check_group()
        check_group(dist.new_group(backend="phalanx"))
        check_group(dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def test_the_host_of_the_store_dies(ranks: RankServer) -> None:
    ended = ranks.start(4, loses_the_store, timeout=None).join()
    codes = [each.code for each in ended]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0, 0], ended[3].report()


# ---- groups that work, or failed without a death ----


def shrinks_what_works() -> None:
    size = dist.get_world_size()
    check_group()
    if dist.get_rank() == 1:
        change = phalanx.shrink()
    else:
        with pytest.raises(Aborted, match=r"it calls phalanx\.shrink"):
            dist.barrier()
        change = phalanx.shrink()
    assert change == (change.rank, size, tuple(range(size)), ())
    check_group()


@HOSTS
def test_a_group_that_works_is_broken_first(ranks: RankServer, hosts: str) -> None:
    ranks.run(3, shrinks_what_works, hosts=hosts)


def one_leaves() -> None:
    check_group()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    fail_until_lost()
    change = phalanx.shrink()
    assert change.lost_ranks == (1,)
    check_group()


@HOSTS
def test_a_rank_that_left_is_not_waited_for(ranks: RankServer, hosts: str) -> None:
    ranks.run(3, one_leaves, hosts=hosts)


# ---- ranks that are late ----


def waits_for_a_late_rank() -> None:
    """Rank 2 is stopped, excluded, and continued."""
    connect_ranks()
    if dist.get_rank() == 2:
        marker_file("victim").write_text(str(os.getpid()))
        marker_file("ready").touch()
        with pytest.raises(PhalanxError):
            dist.barrier()
        with pytest.raises(RankExcluded, match="excluded from the group") as excluded:
            phalanx.shrink()
        assert excluded.value.ranks == (2,)
        with pytest.raises(UsageError, match="left the process group"):
            dist.barrier()
        return
    wait_for_file("ready")
    if dist.get_rank() == 0:
        victim = int(marker_file("victim").read_text())
        with stopped(victim):
            change = phalanx.shrink(timeout=1.0)
    else:
        with pytest.raises(Aborted):
            dist.barrier()
        change = phalanx.shrink(timeout=30.0)
    assert change.lost_ranks == (2,)
    check_group()


@HOSTS
def test_a_stopped_rank_is_excluded(ranks: RankServer, hosts: str) -> None:
    ranks.run(3, waits_for_a_late_rank, hosts=hosts)


def is_interrupted() -> None:
    """Rank 1 is interrupted while it waits for rank 2, and cannot take part again."""
    connect_ranks()
    rank = dist.get_rank()
    if rank == 1:
        once_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            phalanx.shrink()
        with pytest.raises(UsageError, match="this rank has left the group"):
            phalanx.shrink()
        marker_file("interrupted").touch()
        return
    if rank == 2:
        wait_for_file("interrupted")
    change = phalanx.shrink()
    assert change.former_ranks == (0, 2)
    check_group()


@HOSTS
def test_an_interrupted_rank_is_not_waited_for(ranks: RankServer, hosts: str) -> None:
    ranks.run(3, is_interrupted, hosts=hosts)


# ---- pending and prepared operations ----


def has_pending_operations() -> None:
    tensor = torch.ones(50)
    prepared = phalanx.prepare(dist.all_reduce, tensor)
    plan: Any = phalanx.plan([prepared, phalanx.prepare(dist.barrier)])
    prepared()
    connect_ranks()
    if dist.get_rank() == 1:
        die()
    received = dist.irecv(torch.zeros(2), 1)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
    change = phalanx.shrink()
    for work in (received, *works):
        with pytest.raises(PhalanxError):
            work.wait()
    for stale in (prepared, plan):
        with pytest.raises(
            UsageError, match="ranks of its group have changed since: prepare again"
        ):
            stale()
    again = phalanx.prepare(dist.all_reduce, tensor)
    tensor.fill_(2.0)
    again()
    assert (tensor == 2.0 * change.world_size).all()


@HOSTS
def test_pending_operations_end(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(3, has_pending_operations, hosts=hosts, **LIMITS).join()
    for each in ended:
        assert each.code == (-signal.SIGKILL if each.rank == 1 else 0), each.report()


# ---- ranks that die during the agreement ----


def dies_at(victim: int, second: int, delay: float) -> int:
    """One rank dies, and another soon after, at any point of the agreement."""
    rank = dist.get_rank()
    connect_ranks()
    if rank == victim:
        die()
    if rank == second:
        threading.Thread(target=lambda: (time.sleep(delay), die()), daemon=True).start()
    while True:
        fail_until_lost()
        while True:
            change = phalanx.shrink()
            try:
                gathered: list[Any] = [None] * change.world_size
                dist.all_gather_object(gathered, change.former_ranks)
            except PhalanxError:
                continue
            assert len(set(gathered)) == 1
            break
        if dist.get_world_size() == int(os.environ["WORLD_SIZE"]) - 2:
            check_group()
            return dist.get_world_size()


@HOSTS
@pytest.mark.parametrize("trial", range(6))
def test_another_rank_dies_meanwhile(ranks: RankServer, trial: int, hosts: str) -> None:
    seed = random.randrange(2**31)
    generator = random.Random(seed)
    victim, second = generator.sample(range(5), 2)
    delay = generator.uniform(0, 0.03)
    ended = ranks.start(5, dies_at, victim, second, delay, hosts=hosts, **LIMITS).join()
    for each in ended:
        lost = each.rank in (victim, second)
        assert each.code == (-signal.SIGKILL if lost else 0), (seed, trial, each.report())


def dies_after_the_agreement() -> None:
    """Rank 3 dies, and rank 2 when all have agreed on the group, before its first collective."""
    rank = dist.get_rank()
    connect_ranks()
    if rank == 3:
        die()
    if rank == 2:
        rank_changes._begin = lambda *_arguments: die()
    fail_until_lost()
    change = phalanx.shrink()
    assert change.former_ranks == (0, 1)
    assert change.lost_ranks == (2, 3)
    check_group()


@pytest.mark.parametrize("hosts", ("", "aaab", "aabb", "abca"))
def test_a_rank_dies_after_the_agreement(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(4, dies_after_the_agreement, hosts=hosts, **LIMITS).join()
    codes = [0, 0, -signal.SIGKILL, -signal.SIGKILL]
    assert [each.code for each in ended] == codes, ended[0].report()


# ---- what is left behind, and wrong calls ----


def shrinks_often() -> None:
    def shrink_once() -> None:
        phalanx.shrink()
        check_group()

    before = None
    for _ in range(10):
        for _ in range(2):
            shrink_once()
        now = settled_resources(before)
        assert not now.exceeds(before), (before, now)
        # The group's threads start with their first operations: main, collectives, messages.
        before = replace(now, threads=3)


def test_nothing_is_left_behind(ranks: RankServer) -> None:
    ranks.run(2, shrinks_often)


def rejects() -> None:
    for value in (0, -1.0, float("nan"), float("inf"), "soon"):
        with pytest.raises(UsageError, match="timeout is"):
            phalanx.shrink(timeout=value)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a group of the backend 'phalanx'"):
        phalanx.shrink(dist.new_group(backend="gloo"))
    check_group()
    dist.destroy_process_group()
    with pytest.raises(UsageError, match="there is no default group"):
        phalanx.shrink()


def test_wrong_calls_are_refused(ranks: RankServer) -> None:
    ranks.run(2, rejects)
