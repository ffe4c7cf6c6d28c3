"""A failure on one host is reported on all hosts. Hosts are simulated; signals are real."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.transports import TransportError
from tests.ranks import (
    RankOutcome,
    RankServer,
    RunningRanks,
    announce_wait,
    connect_ranks,
    marker_file,
    wait_for_file,
)
from tests.waiting import once_blocked

THIS_FILE = os.path.basename(__file__)


def all_reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(5))


def large_all_reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(2_000_000))


def async_works(rank: int) -> None:
    dist.all_reduce(torch.ones(5), async_op=True).wait()


def async_futures(rank: int) -> None:
    dist.all_reduce(torch.ones(5), async_op=True).get_future().wait()


def receive_messages(rank: int) -> None:
    """Rank 1 receives from its counterpart, the victim, rank 3; the others from each other."""
    dist.recv(torch.ones(5), 3 if rank == 1 else (rank + 1) % 3)


def survive(victim: int, how: str, operation: Callable[[int], None]) -> str:
    rank = dist.get_rank()
    connect_ranks()
    if rank == victim:
        if how == "exit":
            os._exit(7)
        if how == "raise":
            raise RuntimeError("the test's")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost) as caught:  # in the second operation at the latest
        _ = [operation(rank) for _ in range(2)]
    dist.destroy_process_group()
    return str(caught.value)


def survivors(ended: list[RankOutcome], victim: int) -> list[str]:
    return [rank.value for number, rank in enumerate(ended) if number != victim]


@pytest.mark.parametrize("hosts", ("aabb", "abab", "aaab"))
@pytest.mark.parametrize("operation", (all_reduce, large_all_reduce, async_works, async_futures))
def test_killed_rank(ranks: RankServer, hosts: str, operation: Callable[[int], None]) -> None:
    ended = ranks.start(4, survive, 3, "kill", operation, hosts=hosts).join()
    pid = ended[3].pid
    for text in survivors(ended, 3):
        assert re.search(rf": rank 3 \(pid {pid}[^)]*\) (was killed|has died)", text), text


@pytest.mark.parametrize(
    ("how", "message"), [("exit", "exited with code 7"), ("raise", "failed with RuntimeError")]
)
def test_exit_reason_is_reported_on_other_hosts(ranks: RankServer, how: str, message: str) -> None:
    """Ranks of its host detect it and report it to the others, or the rank itself reports it."""
    ended = ranks.start(4, survive, 3, how, all_reduce, hosts="aabb").join()
    texts = survivors(ended, 3)
    assert len({text.partition(": ")[2] for text in texts}) == 1
    assert message in texts[0] or "has died" in texts[0], texts


def test_messages_from_a_dead_rank(ranks: RankServer) -> None:
    ended = ranks.start(4, survive, 3, "kill", receive_messages, hosts="aabb").join()
    for text in survivors(ended, 3):
        assert re.search(r": rank 3 \(pid \d+[^)]*\) (was killed|has died)", text), text


def survive_unconnected() -> str:
    rank = dist.get_rank()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost) as caught:
        receive_messages(rank)
    dist.destroy_process_group()
    return str(caught.value)


def test_messages_from_a_rank_that_died_unconnected(ranks: RankServer) -> None:
    ended = ranks.start(4, survive_unconnected, hosts="aabb").join()
    for text in survivors(ended, 3):
        assert re.search(r": rank 3 \(pid \d+[^)]*\) (was killed|has died)", text), text


def lose_host(victims: tuple[int, ...]) -> str:
    connect_ranks()
    if dist.get_rank() in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost) as caught:
        _ = [dist.all_reduce(torch.ones(5)) for _ in range(3)]
    return str(caught.value)


@pytest.mark.parametrize("hosts", ("aabb", "aabbcc"))
def test_killed_host(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(len(hosts), lose_host, (2, 3), hosts=hosts).join()
    for rank, end in enumerate(ended):
        if rank not in (2, 3):
            text = end.value
            assert re.search(r": rank [23] \(pid \d+[^)]*\) (was killed|has died)", text), text


def wait_for_busy_rank() -> str:
    """Rank 0 waits in memory for rank 1, which computes, while rank 3 dies on another host."""
    rank = dist.get_rank()
    connect_ranks()
    if rank == 3:
        wait_for_file("waiting0")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        wait_for_file("failed")
        return ""
    announce_wait()
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.all_reduce(torch.ones(5))
    marker_file("failed").touch()
    return str(caught.value)


def test_failure_reaches_ranks_that_wait_for_another_rank(ranks: RankServer) -> None:
    ended = ranks.start(4, wait_for_busy_rank, hosts="aabb").join()
    assert "rank 3 (pid" in ended[0].value
    assert ended[1].code == 0


def differ(kind: str, rank: int) -> None:
    tensor = torch.ones(4 if kind == "size" and rank >= 2 else 5)
    if kind == "operation" and rank >= 2:
        dist.broadcast(tensor, 0)
    elif kind == "dtype" and rank >= 2:
        dist.all_reduce(tensor.double())
    elif kind == "message":
        if rank == 1:
            dist.send(torch.ones(7), 2)
        elif rank == 2:
            dist.recv(torch.ones(6), 1)
        dist.barrier()
    elif kind == "left" and rank == 2:
        dist.destroy_process_group()
        raise phalanx.CollectiveMismatch("left the group")
    else:
        dist.all_reduce(tensor)


def mismatch(kind: str) -> str:
    rank = dist.get_rank()
    connect_ranks()
    with pytest.raises(phalanx.CollectiveMismatch) as caught:
        differ(kind, rank)
    return str(caught.value)


@pytest.mark.parametrize("kind", ("operation", "size", "dtype", "message", "left"))
def test_mismatch(ranks: RankServer, kind: str) -> None:
    texts = ranks.run(4, mismatch, kind, hosts="aabb")
    if kind == "left":
        texts.pop(2)
        assert all("rank 2 (pid " in text and "has left the group" in text for text in texts), texts
        return
    reasons = {text.partition(": ")[2] for text in texts}
    assert len(reasons) == 1, reasons
    (reason,) = reasons
    assert reason.startswith("ranks disagree: rank ")
    assert reason.count(f" at {THIS_FILE}:") == 2, reason


def time_out(limit: float) -> str:
    rank = dist.get_rank()
    connect_ranks()
    if rank == 3:
        wait_for_file("over", 30)
        return ""
    with pytest.raises(phalanx.CollectiveTimeout) as caught:
        dist.all_reduce(torch.ones(5))
    marker_file("over").touch()
    return str(caught.value)


def test_late_rank(ranks: RankServer) -> None:
    """Ranks of its host report what it is doing, and all ranks raise the same error."""
    texts = ranks.run(4, time_out, 2.0, timeout=2.0, hosts="aabb")[:3]
    for text in texts:
        assert "rank 3 (pid" in text, texts
        assert "until the timeout of 2 s" in text, texts


def stop_rank() -> str:
    rank = dist.get_rank()
    connect_ranks()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    with pytest.raises(phalanx.CollectiveTimeout) as caught:
        dist.all_reduce(torch.ones(5))
    return str(caught.value)


def test_stopped_rank(ranks: RankServer) -> None:
    run: RunningRanks = ranks.start(4, stop_rank, timeout=2.0, hosts="aabb")
    assert not run.wait(60, [0, 1, 2])
    ended = run.collect()
    for rank in range(3):
        assert "rank 3 (pid" in ended[rank].value
        assert "is stopped by a signal" in ended[rank].value


def abort_group() -> str:
    rank = dist.get_rank()
    connect_ranks()
    if rank == 2:
        phalanx.abort(reason="the loss is NaN")
        return "the loss is NaN by rank 2"
    with pytest.raises(phalanx.Aborted) as caught:
        dist.all_reduce(torch.ones(5))
    return str(caught.value)


def test_abort(ranks: RankServer) -> None:
    for text in ranks.run(4, abort_group, hosts="aabb"):
        assert "by rank 2" in text
        assert "the loss is NaN" in text


def interrupt_rank() -> str:
    rank = dist.get_rank()
    connect_ranks()
    if rank == 1:
        wait_for_file("failed")
        return ""
    if rank == 2:
        once_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(5))
        return "interrupted"
    with pytest.raises(phalanx.Aborted) as caught:
        dist.all_reduce(torch.ones(5))
    if rank == 0:
        marker_file("failed").touch()
    return str(caught.value)


def test_ctrl_c(ranks: RankServer) -> None:
    texts = ranks.run(4, interrupt_rank, hosts="aabb")
    assert texts[2] == "interrupted"
    assert "rank 2 was interrupted in all_reduce" in texts[0]
    assert "rank 2 was interrupted in all_reduce" in texts[3]


def form_again() -> None:
    """After a failure, the survivors form another group."""
    rank = dist.get_rank()
    connect_ranks()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost):
        _ = [dist.all_reduce(torch.ones(5)) for _ in range(2)]
    dist.destroy_process_group()
    dist.init_process_group(
        "phalanx", init_method=f"file://{os.environ['FOLDER']}/again", rank=rank, world_size=3
    )
    tensor = torch.ones(7)
    dist.all_reduce(tensor)
    assert (tensor == 3).all()


def test_survivors_form_another_group(ranks: RankServer) -> None:
    ended = ranks.start(4, form_again, hosts="aabb").join()
    assert [rank.code for rank in ended] == [0, 0, 0, -signal.SIGKILL], ended[0].report()


class SlowTransport:
    """A transport whose transfers release their memory some time after an abort."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.failed, self.ended = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, data: memoryview, peer: int, tag: int) -> Any:
        self._transport.send(data, peer, tag)
        return self

    def wait(self, timeout: float) -> bool:
        if self.ended.is_set():
            raise TransportError(1, "ended at last")
        self.ended.wait(timeout)
        return False

    def abort(self) -> None:
        self._transport.abort()
        self.failed.set()
        threading.Timer(0.3, self.ended.set).start()


def send_to_dead_rank() -> bool:
    """Return whether the transport still used the tensor of a send after the send had failed."""
    connect_ranks()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group: Any = dist.group.WORLD
    native = group._membership.native
    slow = native._transport = native._propagator._transport = SlowTransport(native._transport)
    with pytest.raises(phalanx.PeerLost):
        dist.send(torch.ones(100_000), 1)
    assert slow.failed.is_set()
    return not slow.ended.is_set()


def test_failed_message_releases_its_tensor(ranks: RankServer) -> None:
    ended = ranks.start(2, send_to_dead_rank, timeout=15.0, hosts="ab").join()
    assert ended[0].value is False
