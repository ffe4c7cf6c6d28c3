"""Deadlines, stopped processes, Ctrl-C and abort raise on the rank concerned and on all others."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import Aborted, CollectiveTimeout, PeerLost, PhalanxError
from tests.ranks import (
    RankServer,
    announce_wait,
    marker_file,
    wait_for_file,
    wait_until_others_wait,
)
from tests.waiting import once_blocked, wait_for


def run_on_each_rank(count: int) -> list[torch.Tensor]:
    return [torch.zeros(count) for _ in range(dist.get_world_size())]


WAITS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.zeros(10)),
    "large all_reduce": lambda: dist.all_reduce(torch.zeros(2**20)),
    "barrier": lambda: dist.barrier(),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(1), run_on_each_rank(1)),
    "all_to_all": lambda: dist.all_to_all(run_on_each_rank(2**18), run_on_each_rank(2**18)),
    "uneven all_gather": lambda: dist.all_gather(
        [torch.zeros(1), *run_on_each_rank(2)[1:]], torch.zeros(min(2, dist.get_rank() + 1))
    ),
    "coalesced": lambda: dist.all_reduce_coalesced([torch.zeros(3), torch.zeros(3)]),
    "recv": lambda: dist.recv(torch.zeros(10), 0),
    "recv from any": lambda: dist.recv(torch.zeros(10)),
    "large send": lambda: dist.send(torch.zeros(2**20), 0),
    "work": lambda: dist.all_reduce(torch.zeros(10), async_op=True).wait(),
    "irecv": lambda: dist.irecv(torch.zeros(10), 0).wait(),
}


def rank_0_does_not_come(operation: str) -> None:
    dist.barrier()
    given_up = Path(os.environ["FOLDER"], "given up")
    if dist.get_rank() == 0:
        while not given_up.exists():
            time.sleep(0.001)
        # Too late: this raises.
        with pytest.raises(CollectiveTimeout, match="rank 1 waited for"):
            dist.all_reduce(torch.zeros(10))
        return
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        WAITS[operation]()
    waited = time.monotonic() - start
    given_up.touch()
    assert waited >= 0.5
    message = str(caught.value)
    assert "until the timeout of 0.5 s on this rank" in message, message
    assert "test_abort.py:" in message, message
    if operation != "recv from any":
        assert "rank 1 waited for rank 0 (pid " in message, message


@pytest.mark.parametrize("operation", WAITS)
def test_deadline(ranks: RankServer, operation: str) -> None:
    ranks.run(2, rank_0_does_not_come, operation, timeout=0.5)


def operation_timeout(kind: str, async_op: bool) -> None:
    """The timeout of the group is 20 s; this operation has less, earlier ones keep the group's."""
    given_up, world = Path(os.environ["FOLDER"], "given up"), dist.group.WORLD
    dist.barrier()
    if dist.get_rank() == 0:
        while not given_up.exists():
            time.sleep(0.001)
        return
    made = {
        "all_reduce": (dist.AllreduceOptions(), lambda o: world.allreduce([torch.zeros(9)], o)),
        "all_to_all_single": (
            dist.AllToAllOptions(),
            lambda o: world.all_to_all_single(torch.zeros(2), torch.zeros(2), [], [], o),
        ),
        "reduce_scatter_single": (
            dist.ReduceScatterOptions(),
            lambda o: world.reduce_scatter_single(torch.zeros(1), torch.zeros(2), o),
        ),
        "barrier": (dist.BarrierOptions(), world.barrier),
    }
    options, call = made[kind]
    options.timeout, options.asyncOp = timedelta(seconds=0.3), async_op
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"until the timeout of 0.3 s on this rank"):
        call(options).wait()
    waited = time.monotonic() - start
    given_up.touch()
    assert waited >= 0.3


@pytest.mark.parametrize(
    ("kind", "async_op"),
    [
        ("all_reduce", False),
        ("all_to_all_single", True),
        ("reduce_scatter_single", False),
        ("barrier", True),
    ],
)
def test_the_deadline_of_one_operation(ranks: RankServer, kind: str, async_op: bool) -> None:
    ranks.run(2, operation_timeout, kind, async_op)


def stopped(operation: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    WAITS[operation]()


@pytest.mark.parametrize("operation", ("all_reduce", "recv", "large send", "work"))
def test_a_stopped_rank_is_not_dead(ranks: RankServer, operation: str) -> None:
    run = ranks.start(2, stopped, operation, timeout=0.5)
    assert not run.wait(60, [1])
    first, second = run.collect()
    assert isinstance(second.error, CollectiveTimeout), second.report()
    assert f"rank 0 (pid {first.pid})" in str(second.error)
    assert "rank 0 is stopped by a signal (SIGSTOP)" in str(second.error)


def continued() -> float:
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    return tensor.mean().item()


def test_rank_continues_after_sigcont(ranks: RankServer) -> None:
    run = ranks.start(2, continued)
    while True:
        with open(f"/proc/{run.pids[0]}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "T":
                break
        time.sleep(0.001)
    run.signal(0, signal.SIGCONT)
    assert [rank.value for rank in run.join()] == [2.0, 2.0]


def wait_for_rank_1() -> None:
    dist.recv(torch.zeros(1), 1, tag=9)


def ctrl_c(operation: str) -> str:
    """Interrupt rank 1 while it waits for rank 0, which waits for another operation of rank 1."""
    dist.barrier()
    if dist.get_rank() == 0:
        # A rank that waits for a message receives those that arrive before it.
        other = dist.barrier if operation == "large send" else wait_for_rank_1
        with pytest.raises((Aborted, PeerLost)) as caught:
            other()
        # The operation of a work continues in its thread until the process ends.
        if operation != "work":
            assert isinstance(caught.value, Aborted), caught.value
            assert "rank 1 was interrupted" in str(caught.value)
        return "lost"
    once_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        WAITS[operation]()
    return "interrupted"


@pytest.mark.parametrize("operation", WAITS)
def test_ctrl_c(ranks: RankServer, operation: str) -> None:
    assert ranks.run(2, ctrl_c, operation, timeout=60) == ["lost", "interrupted"]


def handler_that_does_not_raise() -> None:
    """A signal whose handler returns does not disturb the operation."""
    hits: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: hits.append(1))
    dist.barrier()

    def send_signals() -> None:
        for turn in range(4):
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(lambda: len(hits) > turn)  # noqa: B023 - called at once
        marker_file("signalled").touch()

    if dist.get_rank() == 0:
        once_blocked(send_signals)
        received = torch.zeros(1)
        dist.recv(received, 1)
        assert received.item() == 5
        assert len(hits) == 4
    else:
        wait_for_file("signalled")
        dist.send(torch.full((1,), 5.0), 0)


def test_a_handler_that_returns_disturbs_nothing(ranks: RankServer) -> None:
    ranks.run(2, handler_that_does_not_raise)


def abort_by_rank_0(operation: str) -> str:
    dist.barrier()
    if dist.get_rank() == 0:
        wait_until_others_wait()
        dist.group.WORLD.abort()
        return ""
    announce_wait()
    with pytest.raises(Aborted) as caught:
        WAITS[operation]()
    return str(caught.value)


@pytest.mark.parametrize("operation", WAITS)
def test_abort(ranks: RankServer, operation: str) -> None:
    for message in ranks.run(3, abort_by_rank_0, operation)[1:]:
        assert "the group was aborted by rank 0" in message
        assert "test_abort.py:" in message


def abort_while_another_thread_waits() -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        announce_wait()
        try:
            dist.recv(torch.zeros(1), 1 - dist.get_rank())
        except PhalanxError as error:
            errors.append(error)

    dist.barrier()
    thread = threading.Thread(target=wait)
    thread.start()
    if dist.get_rank() == 0:
        wait_until_others_wait()
        wait_for_file("waiting0")
        dist.group.WORLD.abort()
    thread.join(60)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [Aborted]


def test_abort_wakes_threads_of_the_same_process(ranks: RankServer) -> None:
    ranks.run(2, abort_while_another_thread_waits)
