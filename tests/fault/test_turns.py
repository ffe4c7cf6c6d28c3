"""Several threads of a rank in one group run one at a time, and none waits forever."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import Aborted, CollectiveTimeout
from tests.ranks import RankServer
from tests.waiting import once_blocked


def reduce_within(seconds: float) -> None:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    options.timeout = timedelta(seconds=seconds)
    dist.group.WORLD.allreduce([torch.zeros(3)], options).wait()


def wait_behind_another_thread(seconds: float) -> tuple[str, str, float]:
    """Call an operation while another thread is in one that rank 1 does not enter."""
    dist.barrier()
    if dist.get_rank() == 1:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["checked"], timedelta(seconds=30))
        return "", "", 0.0
    errors: list[BaseException] = []

    def first() -> None:
        try:
            reduce_within(60)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    native = dist.group.WORLD._membership.native
    limit = time.monotonic() + 20
    while native.sequence < 2 and time.monotonic() < limit:
        time.sleep(0.001)
    begin = time.monotonic()
    try:
        reduce_within(seconds)
    except CollectiveTimeout as error:
        took = time.monotonic() - begin
        thread.join(60)
        dist.distributed_c10d._get_default_store().set("checked", "1")
        return str(error), str(errors[0]), took
    raise AssertionError("the operation did not wait for the other thread")


def test_wait_for_another_thread_has_a_deadline(ranks: RankServer) -> None:
    own, other, took = ranks.run(2, wait_behind_another_thread, 0.5)[0]
    assert "rank 0 waited for its own turn until the timeout of 0.5 s" in own
    assert "another of its threads is in an operation of this group" in own
    assert "waited for its own turn" in other, "the group is broken for all threads"
    assert took >= 0.5


def interrupt_wait_for_another_thread() -> str:
    dist.barrier()
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().wait(["checked"], timedelta(seconds=30))
        return ""

    def first() -> None:
        with pytest.raises(Aborted):
            reduce_within(60)

    other = threading.Thread(target=first)
    other.start()
    native = dist.group.WORLD._membership.native
    limit = time.monotonic() + 20
    while native.sequence < 2 and time.monotonic() < limit:
        time.sleep(0.001)
    once_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        reduce_within(60)
    except KeyboardInterrupt:
        other.join(60)
        dist.distributed_c10d._get_default_store().set("checked", "1")
        return "interrupted" if not other.is_alive() else "the other thread still waits"
    return "not interrupted"


def test_ctrl_c_while_waiting_for_another_thread(ranks: RankServer) -> None:
    assert ranks.run(2, interrupt_wait_for_another_thread)[0] == "interrupted"


def reduce_in_threads(rounds: int) -> bool:
    """Threads of all ranks use the group in arbitrary order, with tensors of one size."""
    total = torch.zeros(1)
    lock = threading.Lock()

    def work() -> None:
        for _ in range(rounds):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            with lock:
                total.add_(tensor)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return bool(total.item() == 3 * rounds * dist.get_world_size())


def test_many_threads(ranks: RankServer) -> None:
    assert all(ranks.run(2, reduce_in_threads, 300))
