"""Groups in which newcomers take the place of ranks that are lost."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import CollectiveTimeout, UsageError
from tests.fault.test_again import check_group
from tests.fault.test_shrink import HOSTS, die, fail_until_lost
from tests.ranks import RankServer, connect_ranks, marker_file, wait_for_file

LIMITS: dict[str, Any] = {"timeout": None}


def number() -> int:
    """The number of this process among those of the test; the last ones are newcomers."""
    return int(os.environ["RANK"])


def form(rank: int, size: int, seconds: float = 60.0) -> None:
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def join(rank: int, size: int, seconds: float = 60.0) -> None:
    """Form the group as a newcomer."""
    os.environ["PHALANX_NEWCOMER"] = "1"
    form(rank, size, seconds)


def check_all(size: int) -> None:
    assert dist.get_world_size() == size
    assert dist.get_process_group_ranks(None) == list(range(size))
    check_group()
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, dist.get_rank())
    assert ranks == list(range(size))
    for backend in ("phalanx", "gloo"):
        check_group(dist.new_group(backend=backend))
    dist.destroy_process_group()


def takes_the_place(size: int, victims: list[int], is_early: bool) -> None:
    """The newcomers are there before the deaths, or come only after them."""
    if number() >= size:
        if not is_early:
            for victim in victims:
                wait_for_file(f"dying{victim}")
        join(victims[number() - size], size)
        assert dist.get_rank() == victims[number() - size]
    else:
        form(number(), size)
        group = dist.group.WORLD
        dist.new_group(backend="phalanx")  # newcomers learn that there were more groups
        connect_ranks()
        if number() in victims:
            marker_file(f"dying{number()}").touch()
            die()
        fail_until_lost()
        change = phalanx.replace()
        assert dist.group.WORLD is group
        assert change.rank == number()
        assert set(change.lost_ranks) == {*victims}
        assert change.former_ranks == tuple(
            None if rank in victims else rank for rank in range(size)
        )
    check_all(size)


@HOSTS
@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize(("size", "victims"), [(2, [1]), (2, [0]), (3, [1]), (4, [0, 2])])
def test_newcomers_take_the_places(
    ranks: RankServer, size: int, victims: list[int], is_early: bool, hosts: str
) -> None:
    processes = size + len(victims)
    ended = ranks.start(processes, takes_the_place, size, victims, is_early, hosts=hosts, **LIMITS)
    for each in ended.join():
        assert each.code == (-signal.SIGKILL if each.rank in victims else 0), each.report()


def continues_with_fewer() -> None:
    """Without newcomers, the group continues smaller, and grows when one has come."""
    size = 3
    if number() == 3:
        wait_for_file("shrunk")
        join(1, size)
    else:
        form(number(), size)
        connect_ranks()
        if number() == 1:
            die()
        fail_until_lost()
        change = phalanx.replace(wait=0.2)
        assert (change.former_ranks, change.lost_ranks) == ((0, 2), (1,))
        check_group()
        marker_file("shrunk").touch()
        change = phalanx.replace(1)
        assert (change.former_ranks, change.lost_ranks) == ((0, None, 1), ())
        assert change.rank == number()
    check_all(size)


def test_fewer_newcomers_than_wanted(ranks: RankServer) -> None:
    ended = ranks.start(4, continues_with_fewer, **LIMITS).join()
    for each in ended:
        assert each.code == (-signal.SIGKILL if each.rank == 1 else 0), each.report()


def grows() -> None:
    """A group that has lost no rank gets another one, with a rank that it did not have."""
    if number() == 2:
        join(2, 3)
    else:
        form(number(), 2)
        check_group()
        change = phalanx.replace(1)
        assert (change.former_ranks, change.lost_ranks) == ((0, 1, None), ())
    check_all(3)


@HOSTS
def test_a_group_grows(ranks: RankServer, hosts: str) -> None:
    for each in ranks.start(3, grows, hosts=hosts, **LIMITS).join():
        assert each.code == 0, each.report()


def loses_a_newcomer() -> None:
    """A newcomer dies while it waits, and another takes its place."""
    size = 2
    if number() == 2:
        from phalanx.backend import newcomers

        announce = newcomers.announce

        def announce_and_die(*arguments: Any) -> None:
            announce(*arguments)
            marker_file("first").touch()
            die()

        newcomers.announce = announce_and_die  # type: ignore[assignment]
        join(1, size)
    elif number() == 3:
        wait_for_file("first")
        join(1, size)
    else:
        form(number(), size)
        connect_ranks()
        if number() == 1:
            die()
        fail_until_lost()
        wait_for_file("first")
        start = time.monotonic()
        assert phalanx.replace(timeout=1.0).world_size == size
        assert time.monotonic() - start < 20
    check_all(size)


def test_a_newcomer_dies(ranks: RankServer) -> None:
    codes = [each.code for each in ranks.start(4, loses_a_newcomer, **LIMITS).join()]
    assert codes == [0, -signal.SIGKILL, -signal.SIGKILL, 0]


def loses_the_planner(moment: str) -> None:
    """Rank 0 dies when it gives newcomers its plan; rank 1 and the newcomers have another one."""
    size = 3
    if number() >= size:
        join({3: 2, 4: 0}[number()], size)
    else:
        form(number(), size)
        connect_ranks()
        if number() == 2:
            die()
        fail_until_lost()
        if number() == 0:
            from phalanx.backend.newcomers import Newcomers

            invite = Newcomers.invite

            def invite_and_die(self: Newcomers, plan: Any) -> None:
                if moment == "after":
                    invite(self, plan)
                die()

            Newcomers.invite = invite_and_die  # type: ignore[method-assign]
        start = time.monotonic()
        assert phalanx.replace().world_size == size
        assert time.monotonic() - start < 20
    check_all(size)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_rank_that_plans_dies(ranks: RankServer, moment: str) -> None:
    codes = [each.code for each in ranks.start(5, loses_the_planner, moment, **LIMITS).join()]
    assert codes == [-signal.SIGKILL, 0, -signal.SIGKILL, 0, 0]


def refuses_a_version(victim: int) -> None:
    """A newcomer with another version of torch is refused, and the next one joins."""
    size = 2
    if number() == 2:
        torch.__version__ = "1.0"  # type: ignore[assignment]
        with pytest.raises(phalanx.PhalanxError, match=r"runs torch .*: install the same version"):
            join(victim, size)
        marker_file("refused").touch()
        return
    if number() == 3:
        wait_for_file("refused")
        join(victim, size)
    else:
        form(number(), size)
        connect_ranks()
        if number() == victim:
            die()
        fail_until_lost()
        assert phalanx.replace().world_size == size
    check_all(size)


@HOSTS
@pytest.mark.parametrize("victim", [0, 1])
def test_a_newcomer_with_another_version(ranks: RankServer, victim: int, hosts: str) -> None:
    ended = ranks.start(4, refuses_a_version, victim, hosts=hosts, **LIMITS).join()
    for each in ended:
        assert each.code == (-signal.SIGKILL if each.rank == victim else 0), each.report()


def dies_again_and_again(size: int, kills: int) -> None:
    """Rank by rank dies, and each is replaced, until the last newcomer has come."""
    generation = max(number() - size + 1, 0)  # 0 at the start, then that of the newcomer
    if generation:
        wait_for_file(f"death{generation}", 60)
        join((generation - 1) % size, size)
    else:
        form(number(), size)
    for death in range(generation, kills):
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        assert (tensor == size).all()
        marker_file(f"sum{death}-{dist.get_rank()}").touch()
        if dist.get_rank() == death % size:
            for rank in range(size):  # none can still fail in the sum
                wait_for_file(f"sum{death}-{rank}")
            marker_file(f"death{death + 1}").touch()
            die()
        fail_until_lost()
        assert phalanx.replace().world_size == size
    check_all(size)


@HOSTS
def test_every_rank_is_replaced_in_turn(ranks: RankServer, hosts: str) -> None:
    size, kills = 3, 6
    ended = ranks.start(size + kills, dies_again_and_again, size, kills, hosts=hosts, **LIMITS)
    codes = [each.code for each in ended.join()]
    assert sorted(codes) == [-signal.SIGKILL] * kills + [0] * size, codes


def waits_in_vain() -> None:
    with pytest.raises(CollectiveTimeout, match=r"did not call phalanx\.replace within 0\.3 s"):
        join(1, 2, seconds=0.3)


def test_a_newcomer_is_not_wanted(ranks: RankServer) -> None:
    ranks.run(1, waits_in_vain, timeout=None)


def rejects() -> None:
    with pytest.raises(UsageError, match="replace: there is no default group"):
        phalanx.replace()
    form(0, 1)
    for count in (-1, 1.5, "two"):
        with pytest.raises(UsageError, match="replace: count is"):
            phalanx.replace(count)  # type: ignore[arg-type]
    for wait in (-1.0, float("inf"), float("nan"), "long"):
        with pytest.raises(UsageError, match="replace: wait is"):
            phalanx.replace(wait=wait)  # type: ignore[arg-type]
    check_group()


def test_wrong_calls_are_refused(ranks: RankServer) -> None:
    ranks.run(1, rejects, timeout=None)
