"""Groups that get other ranks by PyTorch's `ProcessGroup.reconfigure`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import Aborted, CollectiveTimeout, UsageError
from tests.fault.test_again import check_group
from tests.ranks import RankServer

HOSTS = pytest.mark.parametrize("hosts", ["", "aab", "abc"])


def handle() -> str:
    return dist.group.WORLD.get_reconfigure_handle()  # type: ignore[union-attr, no-any-return]


def reconfigure(uuid: int, handles: Iterable[str], seconds: float | None = None) -> None:
    timeout = None if seconds is None else timedelta(seconds=seconds)
    options = SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={})
    dist.group.WORLD.reconfigure(options).wait()  # type: ignore[union-attr]


def exchange(name: str) -> list[str]:
    """Return the handles of all processes, which need no group for that."""
    store = dist.FileStore(f"{os.environ['FOLDER']}/{name}", -1)
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.set(str(number), handle())
    return [store.get(str(each)).decode() for each in range(size)]


def check_members(numbers: list[int]) -> None:
    """Check that the group has these processes, by their numbers at the start, in this order."""
    rank, size = numbers.index(int(os.environ["RANK"])), len(numbers)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert dist.get_process_group_ranks(None) == list(range(size))
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, int(os.environ["RANK"]))
    assert gathered == numbers
    check_group()


def in_any_order(number: int, handles: list[str]) -> None:
    reconfigure(1, handles[::-1])
    check_members([2, 1, 0])
    reconfigure(2, handles)
    check_members([0, 1, 2])
    reconfigure(3, set(handles))
    check_members([0, 1, 2])


def alone_and_together(number: int, handles: list[str]) -> None:
    reconfigure(10 + number, handles[number : number + 1])
    check_members([number])
    reconfigure(20, handles)
    check_members([0, 1, 2])


def split_and_merged(number: int, handles: list[str]) -> None:
    if number == 1:
        reconfigure(1, handles[1:2])
        check_members([1])
    else:
        reconfigure(2, handles[::2])
        check_members([0, 2])
    reconfigure(3, handles)
    check_members([0, 1, 2])


def without_one(number: int, handles: list[str]) -> None:
    if number != 1:
        reconfigure(1, [handles[2], handles[0]])
        check_members([2, 0])


def after_an_abort(number: int, handles: list[str]) -> None:
    if number == 0:
        dist.group.WORLD.abort()  # type: ignore[union-attr]
    else:
        with pytest.raises(Aborted):
            dist.barrier()
    with pytest.raises((Aborted, UsageError)):
        dist.barrier()
    reconfigure(1, handles)
    check_members([0, 1, 2])


def after_a_timeout(number: int, handles: list[str]) -> None:
    """A rank that doesn't come leaves the group as it was, and the call can be repeated."""
    if number != 2:
        with pytest.raises(CollectiveTimeout, match="rank 2"):
            reconfigure(1, handles, seconds=0.5)
    check_members([0, 1, 2])
    reconfigure(2, handles)
    check_members([0, 1, 2])


def run_with_handles(change: Callable[[int, list[str]], None]) -> None:
    change(int(os.environ["RANK"]), exchange("handles"))


@HOSTS
@pytest.mark.parametrize(
    "change",
    [
        in_any_order,
        alone_and_together,
        split_and_merged,
        without_one,
        after_an_abort,
        after_a_timeout,
    ],
)
def test_ranks_change(ranks: RankServer, change: Callable[..., None], hosts: str) -> None:
    ranks.run(3, run_with_handles, change, hosts=hosts)


def rejects() -> None:
    number, handles = dist.get_rank(), exchange("handles")
    own = handles[number]
    assert handle() == own, "the handle of a process doesn't change"
    for wrong, message in (
        (handles[1 - number : 2 - number], "without the handle of this process"),
        ([own, own], "expected each of them once"),
        ([own, "rank 7"], "expected a result of get_reconfigure_handle"),
        ([own, "[1]"], "expected a result of get_reconfigure_handle"),
        ((own,), "expected a set or list of str"),
        ([own, 1], "expected a set or list of str"),
    ):
        with pytest.raises(UsageError, match=message):
            reconfigure(1, wrong)  # type: ignore[arg-type]
    reconfigure(5 + number, [own])
    with pytest.raises(UsageError, match=f"uuid {5 + number} was already used"):
        reconfigure(5 + number, [own])
    check_members([number])


def test_wrong_calls_are_refused(ranks: RankServer) -> None:
    ranks.run(2, rejects)


def changes_a_subgroup() -> None:
    group: Any = dist.new_group([1, 2], backend="phalanx")
    number = dist.get_rank()
    if number == 0:
        dist.barrier()
        return
    handles: list[Any] = [None, None]
    dist.all_gather_object(handles, group.get_reconfigure_handle(), group=group)
    options = SimpleNamespace(uuid=1, handles=handles[::-1], timeout=None, hints={})
    group.reconfigure(options)
    assert dist.get_process_group_ranks(group) == [2, 1]
    assert dist.get_group_rank(group, number) == 2 - number == dist.get_rank(group)
    tensor = torch.tensor([number])
    dist.broadcast(tensor, src=2, group=group)
    assert tensor.item() == 2
    check_group(group)
    dist.barrier()


def test_a_subgroup_changes(ranks: RankServer) -> None:
    ranks.run(3, changes_a_subgroup)
