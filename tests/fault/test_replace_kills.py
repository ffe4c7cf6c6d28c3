"""Kills at each step by which ranks and newcomers agree on a group, in `phalanx.replace`."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

import phalanx
from phalanx.errors import PhalanxError
from phalanx.system.polling import wait_until
from tests.fault.test_replace import check_all, form, join, number
from tests.fault.test_shrink import die, fail_until_lost
from tests.ranks import RankServer, connect_ranks, marker_file
from tests.seeds import fresh_seed

CALLS = ("set", "get", "add", "check", "compare_set", "multi_set", "multi_get", "delete_key")
SIZE = 3
ROLES = {"root": 0, "survivor": 2, "newcomer": 1}
"""The rank of the process that is killed. Rank 1 was lost before; its newcomer takes that rank."""
STEPS = 60
"""At least as many as there are."""


class Killer:
    """Ends this process before a step: a call of the store that it has not made within `with`.

    Repeated calls are waits.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._seen: set[tuple[str, str]] = set()
        self._is_armed = False
        for name in CALLS:
            setattr(Store, name, self._counting(name, getattr(Store, name)))

    def __enter__(self) -> None:
        self._is_armed = True

    def __exit__(self, *_error: object) -> None:
        self._is_armed = False

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(store: Store, *arguments: Any) -> Any:
            if self._is_armed:
                self._seen.add((name, str(arguments[:1])))
                if len(self._seen) > self._step:
                    marker_file("killed").touch()
                    die()
            return call(store, *arguments)

        return counting


def loses_a_rank_at_a_step(role: str, step: int) -> None:
    """The process with a role is killed; the next newcomer takes its place."""
    killer = Killer(step)
    is_killed = (number() == SIZE) if role == "newcomer" else (number() == ROLES[role])
    if number() == SIZE + 1:
        assert wait_until(
            lambda: marker_file("killed").exists() or marker_file("ended").exists(), 60
        )
        if not marker_file("killed").exists():
            return
        join(ROLES[role], SIZE)
    elif number() == SIZE:
        with killer if is_killed else nullcontext():
            join(1, SIZE)
    else:
        form(number(), SIZE)
        connect_ranks()
        if number() == 1:
            die()
        fail_until_lost()
        with killer if is_killed else nullcontext():
            phalanx.replace()
    while True:
        try:
            dist.all_reduce(tensor := torch.ones(3))
        except PhalanxError:
            phalanx.replace()
        else:
            break
    assert torch.all(tensor == SIZE)
    marker_file("ended").touch()
    check_all(SIZE)


def kill_at_step(ranks: RankServer, role: str, step: int, hosts: str) -> bool:
    """Return whether there was such a step."""
    run = ranks.start(
        SIZE + 2, loses_a_rank_at_a_step, role, step, timeout=None, hosts=hosts and hosts + "aa"
    )
    ended = run.join()
    killed = [each.rank for each in ended if each.code == -signal.SIGKILL]
    victim = SIZE if role == "newcomer" else ROLES[role]
    assert killed in ([1], sorted([1, victim])), [each.report() for each in ended]
    assert all(each.code in (0, -signal.SIGKILL) for each in ended), ended
    return len(killed) == 2


HOSTS = pytest.mark.parametrize("hosts", ("", "aab"))


@pytest.mark.slow
@HOSTS
@pytest.mark.parametrize("role", ROLES)
def test_kills_at_random_steps(ranks: RankServer, role: str, hosts: str) -> None:
    source, steps, kills = random.Random(fresh_seed()), STEPS, 0
    while kills < 4:
        step = source.randrange(steps)
        if kill_at_step(ranks, role, step, hosts):
            kills += 1
        else:
            steps = step  # there are no more


@pytest.mark.long
@pytest.mark.timeout(300)
@HOSTS
@pytest.mark.parametrize("role", ROLES)
def test_a_kill_at_each_step(ranks: RankServer, role: str, hosts: str) -> None:
    steps = 0
    while kill_at_step(ranks, role, steps, hosts):
        steps += 1
    print(f"{steps} steps")
    assert steps > 10
