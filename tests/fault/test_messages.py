"""Messages that are never sent: every rank that waits for one raises an error that names it."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.backend import messages, peer_state
from phalanx.errors import Aborted, CollectiveMismatch, CollectiveTimeout, PeerLost
from tests.ranks import RankServer, marker_file, wait_for_file
from tests.waiting import once_blocked


def zeros(count: int = 10) -> torch.Tensor:
    return torch.zeros(count)


# Rank 1 waits for a message of rank 0 with tag 5, which rank 0 sends with tag 6.
VAIN: dict[str, Callable[[], object]] = {
    "recv": lambda: dist.recv(zeros(), 0, tag=5),
    "recv from any": lambda: dist.recv(zeros(), tag=5),
    "irecv": lambda: dist.irecv(zeros(), 0, tag=5).wait(),
    "future": lambda: dist.irecv(zeros(), 0, tag=5).get_future().wait(),
}


# With the call site of the recv, from the flight recorder.
WAITED = r"tag 5 at test_messages\.py:\d+ until the timeout of"


def tag_without_a_sender(how: str) -> None:
    group: Any = dist.group.WORLD
    dist.barrier()
    if dist.get_rank() == 0:
        dist.send(zeros(), 1, tag=6)
        with pytest.raises(CollectiveTimeout) as caught:
            dist.recv(zeros(), 1, tag=7)
        assert "rank 1 waited for" in str(caught.value)
        assert re.search(WAITED, str(caught.value))
        return
    group.set_timeout(timedelta(seconds=0.5))
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        VAIN[how]()
    assert time.monotonic() - start >= 0.4
    assert "tag 5 at test_messages.py:" in str(caught.value)
    assert re.search(WAITED, str(caught.value))


@pytest.mark.parametrize("how", VAIN)
def test_tag_without_a_sender(ranks: RankServer, how: str) -> None:
    ranks.run(2, tag_without_a_sender, how, timeout=15)


def dies_with_a_thousand_outstanding() -> None:
    folder = Path(os.environ["FOLDER"])
    rank, others = dist.get_rank(), dist.get_world_size() - 1
    if rank == 1:
        while len(list(folder.glob("posted-*"))) < others:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.irecv(zeros(), 1, tag=tag) for tag in range(500)]
    works += [dist.isend(zeros(100_000), 1, tag=tag) for tag in range(500)]
    future = works[0].get_future()
    (folder / f"posted-{rank}").touch()
    for work in works:
        with pytest.raises(PeerLost, match=r"rank 1 .* was killed by SIGKILL"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
    with pytest.raises(PeerLost):
        future.wait()


@pytest.mark.parametrize("world_size", (2, 3))
def test_a_death_with_a_thousand_outstanding(ranks: RankServer, world_size: int) -> None:
    for rank in ranks.start(world_size, dies_with_a_thousand_outstanding, timeout=60).join():
        assert rank.code == (-signal.SIGKILL if rank.rank == 1 else 0), rank.report()


def leave_in_another_thread(how: str) -> None:
    """Leave or abort the group, which wakes a thread that waits for a message."""
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(Exception, match=r"rank 0"):
            dist.recv(zeros(), 0, tag=9)
        return
    errors: list[BaseException] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            dist.recv(zeros(), 1, tag=5)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(60)
    group: Any = dist.group.WORLD
    while group._membership.native.outstanding == 0:
        time.sleep(0.001)
    group.shutdown() if how == "shutdown" else group.abort()
    thread.join(60)
    assert not thread.is_alive()
    (error,) = errors
    assert isinstance(error, Aborted), error
    assert "tag 5 at test_messages.py:" in str(error), error


def leaves_while_another_thread_describes_its_failure() -> None:
    """The group is closed between two reads of the error's text: it is the error even so."""
    if dist.get_rank() == 1:
        with pytest.raises(Aborted):
            dist.recv(zeros(), 0)
        return
    group: Any = dist.group.WORLD
    has_left = threading.Event()
    reading = threading.Event()
    build_rank = peer_state.build_rank

    def read_then_lose_the_group(recorder: Any) -> Any:
        reading.set()
        assert has_left.wait(60)
        return build_rank(recorder)

    errors: list[BaseException] = []

    def wait() -> None:
        try:
            dist.recv(zeros(), 1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while group._membership.native.outstanding == 0:
        time.sleep(0.001)
    peer_state.build_rank = read_then_lose_the_group  # type: ignore[assignment]
    group._membership.native.abort("the test says so")
    assert reading.wait(60)
    group.abort()
    has_left.set()
    thread.join(60)
    (error,) = errors
    assert isinstance(error, Aborted), error
    assert "recv float32[10] from rank 1 at " in str(error)


def test_the_group_is_left_while_an_error_is_described(ranks: RankServer) -> None:
    ranks.run(2, leaves_while_another_thread_describes_its_failure)


def wait_for_a_message_of_a_closed_group() -> None:
    """A thread begins to wait when another one has closed the group and not told it yet."""
    group: Any = dist.group.WORLD
    dist.barrier()
    works = [dist.irecv(zeros(), 1 - dist.get_rank()) for _ in range(2)]
    membership = group._membership
    membership.stop_threads()
    membership.leave()
    assert works[0].is_completed()
    assert not works[0].is_success()
    with pytest.raises(Aborted, match="this rank has left the group"):
        works[1].wait()


def test_a_wait_for_a_message_of_a_closed_group(ranks: RankServer) -> None:
    ranks.run(2, wait_for_a_message_of_a_closed_group)


def serves_after_a_client_has_left() -> None:
    """Rank 0 has posted a receive for each client; rank 2 leaves and has sent nothing."""
    rank = dist.get_rank()
    received = zeros(1)
    dist.barrier()
    if rank == 2:
        dist.destroy_process_group()
        marker_file("left").touch()
        return
    works = [dist.irecv(zeros(), peer) for peer in (1, 2)] if rank == 0 else []
    wait_for_file("left")
    for number in range(100):
        if rank == 1:
            dist.send(torch.full((1,), float(number)), 0, tag=1)
        dist.recv(received, 1 - rank, tag=1)
        assert received == number
        if rank == 0:
            dist.send(received, 1, tag=1)
    if rank == 1:
        dist.send(zeros(), 0)
        return
    works[0].wait()
    with pytest.raises(CollectiveMismatch, match=r"rank 2 .* has left the group"):
        works[1].wait()


def test_a_server_goes_on_when_a_client_leaves(ranks: RankServer) -> None:
    ranks.run(3, serves_after_a_client_has_left)


@pytest.mark.parametrize("how", ("shutdown", "abort"))
def test_leaving_wakes_other_threads(ranks: RankServer, how: str) -> None:
    ranks.run(2, leave_in_another_thread, how)


def interrupt_beside_a_stream() -> None:
    """Interrupt a recv while another thread continuously moves messages."""
    rank = dist.get_rank()

    def stream() -> None:
        tensor = zeros(2**20)
        try:
            while True:
                dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        except Aborted:
            pass

    thread = threading.Thread(target=stream)
    thread.start()
    if rank == 1:
        once_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            dist.recv(zeros(), 0, tag=1)
    thread.join(60)
    assert not thread.is_alive()


def test_ctrl_c_beside_a_stream(ranks: RankServer) -> None:
    ranks.run(2, interrupt_beside_a_stream)


def unexpected_message_memory() -> str:
    """Messages in private memory cause one warning, and their memory is freed."""
    messages._UNEXPECTED_BYTES_LIMIT = 2**20
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx").addHandler(handler)
    if dist.get_rank() == 0:
        for tag in range(20):
            dist.send(zeros(100_000), 1, tag=tag)
    else:
        for tag in reversed(range(20)):
            dist.recv(zeros(100_000), 0, tag=tag)
    return "\n".join(told)


def test_memory_of_unexpected_messages(ranks: RankServer) -> None:
    silent, told = ranks.run(2, unexpected_message_memory)
    assert silent == ""
    assert told.count("\n") == 0
    assert "7 MiB of messages arrived before their recv" in told
