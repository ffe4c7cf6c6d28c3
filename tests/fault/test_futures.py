"""Futures deliver failures to callbacks, to chained futures, and to C++ code of PyTorch."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.backend.work import WorkFuture
from phalanx.errors import CollectiveMismatch, PeerLost
from tests.ranks import RankServer


def die() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def under_way() -> Any:
    work = dist.all_reduce(torch.zeros(10), async_op=True)
    assert work is not None
    return work.get_future()


def chains() -> None:
    die()
    future, seen = under_way(), []
    future.add_done_callback(lambda done: seen.append(done.done()))
    chained = future.then(lambda done: done.value()).then(lambda done: done.wait())
    for call in (future.wait, future.value, chained.wait, chained.value):
        with pytest.raises(PeerLost, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
            call()
    rescued = chained.then(lambda done: 5)
    assert (rescued.wait(), rescued.value(), seen) == (5, 5, [True])
    with pytest.raises(PeerLost):
        torch.futures.wait_all([rescued, future])


def test_a_chain_of_futures(ranks: RankServer) -> None:
    first, _ = ranks.start(2, chains).join()
    assert first.code == 0, first.report()


def combine_works() -> None:
    die()
    world: Any = dist.group.WORLD
    world._start_coalescing(None)
    dist.all_reduce(torch.zeros(10), async_op=True)
    dist.irecv(torch.zeros(5), 1)
    work = world._end_coalescing(None)
    with pytest.raises(PeerLost, match="was killed by SIGKILL"):
        work.get_future().wait()
    with pytest.raises(PeerLost, match="was killed by SIGKILL"):
        work.wait()


def test_combined_works(ranks: RankServer) -> None:
    first, _ = ranks.start(2, combine_works).join()
    assert first.code == 0, first.report()


def averaged(process_group, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations
    work = dist.all_reduce(bucket.buffer(), group=process_group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0] / 2)


def in_ddp(hook: Callable[..., Any] | None) -> None:
    """Train with DDP, whose reducer waits in C++ and keeps only the message of an exception."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    if hook is not None:
        model.register_comm_hook(dist.group.WORLD, hook)
    loss: Tensor = model(torch.ones(2, 4)).sum()
    die()
    with pytest.raises(RuntimeError, match=r"PeerLost: .* all_reduce .* was killed by SIGKILL"):
        loss.backward()
    with pytest.raises(PeerLost):
        dist.barrier()


@pytest.mark.parametrize("hook", (None, averaged))
def test_a_death_in_ddp(ranks: RankServer, hook: Callable[..., Any] | None) -> None:
    first, _ = ranks.start(2, in_ddp, hook).join()
    assert first.code == 0, first.report()


def chain_without_a_failure() -> None:
    doubled = under_way().then(lambda done: done.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.zeros(10))
    failing = doubled.then(lambda done: {}["no such key"])
    with pytest.raises(KeyError, match="no such key"):
        failing.wait()


def test_chains_without_a_failure(ranks: RankServer) -> None:
    ranks.run(2, chain_without_a_failure)


def failed_and_left() -> None:
    group = weakref.ref(dist.group.WORLD)
    future = under_way() if dist.get_rank() == 0 else None
    if future is None:
        with pytest.raises(CollectiveMismatch):
            dist.barrier()
    else:
        with pytest.raises(CollectiveMismatch):
            future.then(lambda done: done.value()).wait()
    del future
    dist.destroy_process_group()
    gc.collect()
    assert group() is None


def test_failed_future_does_not_keep_its_group(ranks: RankServer) -> None:
    """C++ holds its value, so the garbage collector cannot follow the exception's references."""
    ranks.run(2, failed_and_left)


class NotCopyable(Exception):
    """An exception that cannot be constructed from its own arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


@pytest.mark.parametrize("error", (NotCopyable(1, 2), KeyboardInterrupt(), ValueError("a", 5)))
def test_any_exception_can_fail_a_future(error: BaseException) -> None:
    future = WorkFuture()
    future.fail(error)
    for call in (future.wait, future.value):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value.args == error.args


def are_finished_works_alive() -> list[bool]:
    """Return whether finished works are still alive without the garbage collector."""
    gc.disable()
    left = []
    for chained in (False, True):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        kept = future.then(lambda done: 1) if chained else None
        future.wait()
        dist.all_reduce(torch.ones(3), async_op=True).wait()  # the thread has released the first
        there = weakref.ref(work)
        del work, future
        left.append(there() is not None)
        del kept
    return left


def test_a_future_does_not_keep_its_work(ranks: RankServer) -> None:
    assert ranks.run(2, are_finished_works_alive) == [[False, False]] * 2
