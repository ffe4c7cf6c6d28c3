"""Calls of a worker that is there and does nothing: their timeouts hold all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import CallTimeout
from phalanx.rpc.current_agent import agent
from tests.ranks import RankServer
from tests.rpc_training import worker
from tests.waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def echo(value: Any) -> Any:
    return value


NOTED: list[int] = []


def note(number: int, _ballast: str = "") -> int:
    NOTED.append(number)
    return number


def noted() -> list[int]:
    return NOTED


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process is stopped within it, all of its threads."""
    os.kill(pid, signal.SIGSTOP)
    try:
        threads = list(Path(f"/proc/{pid}/task").glob("*/stat"))
        wait_for(lambda: all(") T " in each.read_text() for each in threads))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def call_one_who_is_stopped() -> None:
    """Connecting and sending count too, and the worker is no worse for it."""
    assert rpc.rpc_sync(1, echo, (1,)) == 1
    much = [torch.ones(1000) for _ in range(3000)]  # they go by the socket, which hasn't that room
    with stopped(agent().peers[1].record.pid):
        for what, words in ((much, "doesn't read: is it stopped"), (1, "answer within 1 s: is it")):
            begun = time.monotonic()
            with pytest.raises(CallTimeout, match=f"echo.* worker 'w1' .*{words}"):
                rpc.rpc_sync(1, echo, (what,), timeout=1)
            assert 0.9 < time.monotonic() - begun < 5
    assert torch.equal(torch.stack(rpc.rpc_sync(1, echo, (much,))), torch.stack(much))


def begin_calls_of_one_who_is_stopped() -> None:
    """Nobody is held by what there is no room for; it goes out, each once, when there is."""
    rpc.rpc_async(1, note, (0,)).wait()
    with stopped(agent().peers[1].record.pid):
        begun = time.monotonic()
        late = [rpc.rpc_async(1, note, (0, "x" * 1000), timeout=1) for _ in range(1000)]
        kept = [rpc.rpc_async(1, note, (number, "x" * 1000)) for number in range(1000)]
        assert time.monotonic() - begun < 20
        for future in late:
            with pytest.raises(CallTimeout, match=r"note.* took longer than its timeout"):
                future.wait()
        assert not any(future.done() for future in kept)
    assert [future.wait() for future in kept] == list(range(1000))
    assert sorted(rpc.rpc_sync(1, noted)) == sorted([0] * 1001 + list(range(1000)))


def as_one_of_two() -> None:
    with worker() as rank:
        if rank == 0:
            call_one_who_is_stopped()
            begin_calls_of_one_who_is_stopped()


def test_one_who_is_stopped(ranks: RankServer) -> None:
    ranks.run(2, as_one_of_two)
