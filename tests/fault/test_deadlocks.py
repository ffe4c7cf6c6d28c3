"""Groups used in different orders: the deadlock is detected long before the deadline."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from phalanx.diagnosis.flight_recorders import parse_rank_ranges
from phalanx.errors import CollectiveMismatch, CollectiveTimeout
from phalanx.topology.layout import format_rank_ranges
from tests.ranks import RankServer


def all_reduce(group: object, way: object) -> None:
    """Reduce in the caller's thread, or in the group's, waiting for the work or its future."""
    if way == "future":
        dist.all_reduce(torch.zeros(3), group=group, async_op=True).get_future().wait()
        return
    if way == "chain":
        work = dist.all_reduce(torch.zeros(3), group=group, async_op=True)
        work.get_future().then(lambda done: done.value()).wait()
        return
    work = dist.all_reduce(torch.zeros(3), group=group, async_op=bool(way))
    if work is not None:
        work.wait()


def opposite_order(pairs: list[tuple[int, int]], is_async: tuple[object, ...] = ()) -> None:
    """Enter the groups on rank r from number r on: each rank waits for the next."""
    groups = [dist.new_group(sorted(pair)) for pair in pairs]
    dist.barrier()
    rank = dist.get_rank()
    for group in (groups[rank], groups[rank - 1]):
        all_reduce(group, is_async and is_async[rank])
    raise AssertionError("no deadlock was detected")


@pytest.mark.parametrize(
    "is_async",
    ((False, False), (True, True), (True, False), ("future", False), ("chain", "future")),
)
def test_two_groups_of_two_ranks_in_opposite_order(
    ranks: RankServer, is_async: tuple[object, ...]
) -> None:
    for ended in ranks.start(2, opposite_order, [(0, 1), (0, 1)], is_async).join():
        text = str(ended.error)
        assert isinstance(ended.error, CollectiveMismatch), ended.report()
        assert "ranks use groups in different orders" in text
        for rank, group in ((0, "1"), (1, "2")):
            wait = f"rank {rank} waits in all_reduce #1 of group '{group}' at test_deadlocks.py"
            assert wait in text


@pytest.mark.parametrize(("size", "is_async"), ((3, False), (4, False), (5, False), (4, True)))
def test_cycle_of_pairs(ranks: RankServer, size: int, is_async: bool) -> None:
    """No group has all ranks, and no rank is in all groups: each rank propagates the failure."""
    pairs = [(rank, (rank + 1) % size) for rank in range(size)]
    for ended in ranks.start(size, opposite_order, pairs, (is_async,) * size).join():
        assert isinstance(ended.error, CollectiveMismatch), ended.report()
        text = str(ended.error)
        for rank in range(size):
            assert f"rank {rank} waits in all_reduce #1 of group '{rank + 1}' at" in text


def continue_after_a_cycle() -> list[str]:
    """Ranks 0 and 1 form a cycle; rank 2 waits for rank 0, and rank 3 enters later."""
    groups = [dist.new_group(list(ranks)) for ranks in ((0, 1), (0, 1), (0, 2), (1, 3))]
    dist.barrier()
    rank, told = dist.get_rank(), []
    orders = {0: [groups[0], groups[1]], 1: [groups[1], groups[0]], 2: [groups[2]], 3: [groups[3]]}
    until = time.monotonic() + 5
    while rank == 3 and time.monotonic() < until:
        torch.zeros(1000).sum()
    for group in orders[rank]:
        try:
            dist.all_reduce(torch.zeros(3), group=group)
        except CollectiveMismatch as error:
            told.append(str(error))
    if rank == 1:
        dist.all_reduce(torch.zeros(3), group=groups[3])
    return told


def test_failure_reaches_ranks_that_wait_for_a_cycle(ranks: RankServer) -> None:
    """A group in which no rank waits for the cycle stays usable."""
    told = ranks.run(4, continue_after_a_cycle)
    assert [len(texts) for texts in told] == [2, 2, 1, 0]
    for text in (*told[0], *told[1], *told[2]):
        assert "groups in different orders: rank" in text
        for rank in (0, 1):
            assert f"rank {rank} waits in all_reduce #1 of group" in text


def crossed_but_async() -> bool:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    order = [first, second] if dist.get_rank() == 0 else [second, first]
    works = [dist.all_reduce(torch.ones(3), group=order[0], async_op=True)]
    late = time.monotonic() + 2.5
    while dist.get_rank() == 1 and time.monotonic() < late:
        torch.zeros(1000).sum()  # busy for longer than a search for cycles takes
    works.append(dist.all_reduce(torch.ones(3), group=order[1], async_op=True))
    for work in works:
        work.wait()
    return True


def busy(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.zeros(1000).sum()


def post_all_before_waiting() -> bool:
    """The last rank is late; the others wait for it in opposite orders."""
    groups = [dist.new_group(), dist.new_group()]
    rank = dist.get_rank()
    order = groups if rank == 0 else groups[::-1]
    if rank == dist.get_world_size() - 1:
        busy(4)
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    return True


def enter_from_a_callback() -> bool:
    """Rank 1 waits in the second group, and enters the first from the callback of another work."""
    first, second, third = (dist.new_group([0, 1]) for _ in range(3))
    if dist.get_rank() == 0:
        works = [dist.all_reduce(torch.ones(3), group=first, async_op=True)]
        threading.Timer(3, dist.all_reduce, (torch.ones(3), dist.ReduceOp.SUM, third)).start()
    else:
        ends = dist.all_reduce(torch.ones(3), group=third, async_op=True).get_future()
        ends.add_done_callback(lambda _: dist.all_reduce(torch.ones(3), group=first))
        works = [dist.all_reduce(torch.ones(3), group=second, async_op=True)]
    works[0].wait()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), group=second)
    return True


def wait_with_a_timeout() -> bool:
    """Rank 0 waits in the first group for a while, and then enters the second."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=first, async_op=True)
        with pytest.raises(CollectiveTimeout):
            work.wait(timedelta(seconds=3))
        dist.all_reduce(torch.ones(3), group=second)
        work.wait()
    else:
        dist.all_reduce(torch.ones(3), group=second)
        dist.all_reduce(torch.ones(3), group=first)
    return True


def another_thread_comes(earlier: int | None) -> bool:
    """A helper thread of rank 0 enters the second group, after longer than a search takes.

    Args:
        earlier: The number of operations since its last one; None if it has made none.
    """
    first, second, third = (dist.new_group([0, 1]) for _ in range(3))
    has_begun, comes = threading.Event(), threading.Event()

    def help_later() -> None:
        if earlier is not None:
            dist.all_reduce(torch.ones(3), group=third)
        has_begun.set()
        comes.wait()
        dist.all_reduce(torch.ones(3), group=second)

    if dist.get_rank() == 0:
        helper = threading.Thread(target=help_later)
        helper.start()
        has_begun.wait()
    elif earlier is not None:
        dist.all_reduce(torch.ones(3), group=third)
    for _ in range(earlier or 0):
        dist.barrier()
    if dist.get_rank() == 0:
        threading.Timer(4, comes.set).start()
        dist.all_reduce(torch.ones(3), group=first)
        helper.join()
    else:
        dist.all_reduce(torch.ones(3), group=second)
        dist.all_reduce(torch.ones(3), group=first)
    return True


def a_signal_handler_comes() -> bool:
    """A handler of rank 0 enters the second group while its main thread waits in the first."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() == 0:
        signal.signal(signal.SIGUSR2, [].append)  # its __module__ is None
        signal.signal(
            signal.SIGUSR1, lambda *_: dist.all_reduce(torch.ones(3), group=second) or None
        )
        threading.Timer(4, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        dist.all_reduce(torch.ones(3), group=first)
    else:
        dist.all_reduce(torch.ones(3), group=second)
        dist.all_reduce(torch.ones(3), group=first)
    return True


def late_in_one_of_two_groups() -> bool:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    until = time.monotonic() + 2.5
    for group in (first, second):
        while dist.get_rank() == 1 and time.monotonic() < until:
            torch.zeros(1000).sum()
        dist.all_reduce(torch.ones(3), group=group)
    return True


def stop_while_waiting() -> bool:
    """Rank 1 is stopped while it waits for rank 0, which then arrives and waits for rank 1."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, 1)
    goes_on = threading.Timer(4, os.kill, (int(pid), signal.SIGCONT))
    if dist.get_rank() == 0:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            torch.zeros(1000).sum()
        os.kill(int(pid), signal.SIGSTOP)
        goes_on.start()
    for group in (first, second):
        dist.all_reduce(torch.ones(3), group=group)
    return True


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "function"),
    (
        (2, crossed_but_async),
        (2, post_all_before_waiting),
        (3, post_all_before_waiting),
        (2, enter_from_a_callback),
        (2, wait_with_a_timeout),
        (2, partial(another_thread_comes, None)),
        (2, partial(another_thread_comes, 100)),
        (2, a_signal_handler_comes),
        (2, late_in_one_of_two_groups),
        (2, stop_while_waiting),
    ),
)
def test_no_deadlock(ranks: RankServer, size: int, function: object) -> None:
    assert all(ranks.run(size, function))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", ([0, 1, 2, 3], [6, 0, 1], [5], [3, 2, 1], []))
def test_parse_rank_ranges(ranks: list[int]) -> None:
    assert parse_rank_ranges(format_rank_ranges(ranks)) == tuple(ranks)


@pytest.mark.parametrize("text", ("0-2000000000", "0-40000,0-40000", "a", "1-", "-1", "1,,x", "²"))
def test_parse_invalid_rank_ranges(text: str) -> None:
    assert parse_rank_ranges(text) in ((), (1,))
