"""Calls of a stopped worker: their timeouts hold."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import CallTimeout
from phalanx.rpc.agent import agent
from tests.ranks import RankServer
from tests.rpc_training import worker
from tests.waiting import stopped


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def echo(value: Any) -> Any:
    return value


RECORDED: list[int] = []


def record(number: int, _ballast: str = "") -> int:
    RECORDED.append(number)
    return number


def get_recorded() -> list[int]:
    return RECORDED


def call_stopped_worker() -> None:
    """The timeout includes connecting and sending, and the worker works normally afterwards."""
    assert rpc.rpc_sync(1, echo, (1,)) == 1
    large = [torch.ones(1000) for _ in range(3000)]  # sent by the socket, whose buffer is smaller
    with stopped(agent().peers[1].record.pid):
        for value, message in (
            (large, "does not read: is it stopped"),
            (1, "answer within 1 s: is it"),
        ):
            start = time.monotonic()
            with pytest.raises(CallTimeout, match=f"echo.* worker 'w1' .*{message}"):
                rpc.rpc_sync(1, echo, (value,), timeout=1)
            assert time.monotonic() - start > 0.9
    assert torch.equal(torch.stack(rpc.rpc_sync(1, echo, (large,))), torch.stack(large))


def start_calls_of_stopped_worker() -> None:
    """Calls beyond the socket buffer do not block, and are sent exactly once later."""
    rpc.rpc_async(1, record, (0,)).wait()
    with stopped(agent().peers[1].record.pid):
        late = [rpc.rpc_async(1, record, (0, "x" * 1000), timeout=1) for _ in range(1000)]
        kept = [rpc.rpc_async(1, record, (number, "x" * 1000)) for number in range(1000)]
        for future in late:
            with pytest.raises(CallTimeout, match=r"record.* took longer than its timeout"):
                future.wait()
        assert not any(future.done() for future in kept)
    assert [future.wait() for future in kept] == list(range(1000))
    assert sorted(rpc.rpc_sync(1, get_recorded)) == sorted([0] * 1001 + list(range(1000)))


def run_as_one_of_two() -> None:
    with worker() as rank:
        if rank == 0:
            call_stopped_worker()
            start_calls_of_stopped_worker()


def test_stopped_worker(ranks: RankServer) -> None:
    ranks.run(2, run_as_one_of_two)
