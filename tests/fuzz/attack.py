"""Worker 2 calls worker 1 while unauthenticated clients and worker 0 send it garbage."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import re
import resource
import threading
import time
from collections import Counter
from typing import Any

import psutil
import torch

from phalanx import rpc
from phalanx.rpc import server
from phalanx.rpc.agent import agent
from tests.fuzz.byzantine_worker import ByzantineWorker
from tests.fuzz.unauthenticated_clients import UnauthenticatedClients

__all__ = ["run_attack"]

# The allowed growth of the worker's memory, in bytes.
MAX_GROWTH = 300 * 2**20
# The memory that it may map in addition: announced lengths must not be allocated.
MAX_MAPPED = 4 * 2**30


def echo(value: Any) -> Any:
    return value


def warnings() -> list[str]:
    return [record.getMessage() for record in _RECORDS]


_RECORDS: list[logging.LogRecord] = []


class _RecordingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _RECORDS.append(record)


def limit_memory() -> None:
    limit = psutil.Process().memory_info().vms + MAX_MAPPED
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def get_resources() -> dict[str, int]:
    """Return the resources that this worker uses."""
    gc.collect()
    process = psutil.Process()
    return {
        "bytes": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": threading.active_count(),
        "leased": agent().shm_sender.leased_count,
    }


def open_files() -> dict[str, int]:
    """Return the open files of this worker by kind, to locate leaks."""
    kinds: Counter[str] = Counter()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[re.sub(r"\d+", "#", os.readlink(f"/proc/self/fd/{each}"))] += 1
    return dict(kinds)


def call_worker_0(number: int) -> int:
    """Call worker 0, whose answer comes among malformed ones."""
    return int(rpc.rpc_sync(0, echo, (number,)))


def call(number: int) -> bool:
    """Call worker 1 from worker 2; return whether the results are correct."""
    tensor = torch.randn(5000) if number % 11 == 0 else torch.randn(5)
    is_same = torch.equal(rpc.rpc_sync(1, echo, (tensor,), timeout=30), tensor)
    return is_same and rpc.rpc_async(1, echo, (number,), timeout=30).wait() == number


def run_attack(frames: int, seed: int) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """Run the attack on each rank; worker 0 is the Byzantine worker and the clients.

    Returns:
        The log of worker 1, and its resources before and afterwards.
    """
    logging.getLogger("phalanx.rpc").addHandler(_RecordingHandler())
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker-{rank}")
    result: tuple[list[str], dict[str, int], dict[str, int]] = [], {}, {}
    if rank == 0:
        result = _attack(frames, seed)
    rpc.shutdown(timeout=60)
    return result


def _attack(frames: int, seed: int) -> tuple[list[str], dict[str, int], dict[str, int]]:
    own, victim = agent(), agent().peers[1]
    canary = f"{os.environ['FOLDER']}/canary"
    address, port = victim.record.address, "" if victim.is_local else victim.address
    clients = UnauthenticatedClients(address, port, canary, seed)
    byzantine = ByzantineWorker(own._key, address, port, own.shm_sender, seed)
    rpc.rpc_sync(1, limit_memory)
    assert rpc.rpc_sync(2, call, (0,))
    before = rpc.rpc_sync(1, get_resources)
    generator = random.Random(seed)
    for number in range(frames):
        (clients if generator.randrange(20) == 0 else byzantine).send()
        if number % 97 == 0:
            assert rpc.rpc_sync(2, call, (number,))
        if number % 997 == 0:
            assert _answer_among_malformed(byzantine, number) == number
    clients.close()
    byzantine.close()
    after = _wait_until_settled(before)
    assert not os.path.exists(canary), "an unauthenticated message was executed"
    return rpc.rpc_sync(1, warnings), before, after


def _answer_among_malformed(byzantine: ByzantineWorker, number: int) -> int:
    original = server._reply

    def send_malformed_first(connection: Any, frames: Any) -> None:
        for _ in range(5):
            connection.send_answer(byzantine._frame())
        original(connection, frames)

    server._reply = send_malformed_first
    try:
        return int(rpc.rpc_sync(1, call_worker_0, (number,), timeout=30))
    finally:
        server._reply = original


def _wait_until_settled(before: dict[str, int]) -> dict[str, int]:
    """Return the victim's resources once its connections have ended; clients have ten seconds."""
    deadline = time.monotonic() + 30
    while True:
        after: dict[str, int] = rpc.rpc_sync(1, get_resources)
        leaked = [name for name in ("files", "leased") if after[name] > before[name] + 5]
        if after["threads"] <= before["threads"] + 20 and not leaked:
            break
        assert time.monotonic() < deadline, (before, after, rpc.rpc_sync(1, open_files))
        time.sleep(0.1)
    assert after["bytes"] < before["bytes"] + MAX_GROWTH, (before, after)
    return after
