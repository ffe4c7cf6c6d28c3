"""Worker 2 calls worker 1, to which strangers, and worker 0 gone mad, send garbage meanwhile."""

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
from phalanx.rpc.current_agent import agent
from phalanx.rpc.transport import server
from tests.fuzz.mad import Mad
from tests.fuzz.strangers import Strangers

__all__ = ["under_attack"]

# What the worker may have more in the end than at the beginning.
MOST_MORE = 300 * 2**20
# What it could have at all: what is announced must not be allocated.
MOST_MAPPED = 4 * 2**30


def echo(value: Any) -> Any:
    return value


def warnings() -> list[str]:
    return [record.getMessage() for record in _RECORDS]


_RECORDS: list[logging.LogRecord] = []


class _Noted(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _RECORDS.append(record)


def limit() -> None:
    most = psutil.Process().memory_info().vms + MOST_MAPPED
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def state() -> dict[str, int]:
    """What this worker has."""
    gc.collect()
    me = psutil.Process()
    return {
        "bytes": me.memory_info().rss,
        "files": me.num_fds(),
        "threads": threading.active_count(),
        "leased": agent().shm_sender.leased_count,
    }


def open_files() -> dict[str, int]:
    """What this worker has open, for who looks for a leak."""
    kinds: Counter[str] = Counter()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[re.sub(r"\d+", "#", os.readlink(f"/proc/self/fd/{each}"))] += 1
    return dict(kinds)


def asked_back(number: int) -> int:
    """Worker 0's answers come among others, that are none."""
    return int(rpc.rpc_sync(0, echo, (number,)))


def call(number: int) -> bool:
    """Worker 2, whose calls nothing of it must touch."""
    tensor = torch.randn(5000) if number % 11 == 0 else torch.randn(5)
    same = torch.equal(rpc.rpc_sync(1, echo, (tensor,), timeout=30), tensor)
    return same and rpc.rpc_async(1, echo, (number,), timeout=30).wait() == number


def under_attack(frames: int, seed: int) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """What each rank runs: worker 0 plays the mad one and the strangers.

    Returns:
        What worker 1 has logged, and what it had before and afterwards.
    """
    logging.getLogger("phalanx.rpc").addHandler(_Noted())
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker-{rank}")
    said: tuple[list[str], dict[str, int], dict[str, int]] = [], {}, {}
    if rank == 0:
        said = _attack(frames, seed)
    rpc.shutdown(timeout=60)
    return said


def _attack(frames: int, seed: int) -> tuple[list[str], dict[str, int], dict[str, int]]:
    own, victim = agent(), agent().peers[1]
    canary = f"{os.environ['FOLDER']}/canary"
    address, port = victim.record.address, "" if victim.is_local else victim.address
    strangers = Strangers(address, port, canary, seed)
    mad = Mad(own._key, address, port, own.shm_sender, seed)
    rpc.rpc_sync(1, limit)
    assert rpc.rpc_sync(2, call, (0,))
    before = rpc.rpc_sync(1, state)
    chance = random.Random(seed)
    for number in range(frames):
        (strangers if chance.randrange(20) == 0 else mad).send()
        if number % 97 == 0:
            assert rpc.rpc_sync(2, call, (number,))
        if number % 997 == 0:
            assert _answers_among_others(mad, number) == number
    strangers.close()
    mad.close()
    after = _settled(before)
    assert not os.path.exists(canary), "a stranger's message was executed"
    return rpc.rpc_sync(1, warnings), before, after


def _answers_among_others(mad: Mad, number: int) -> int:
    right = server._reply

    def answer(stream: Any, frames: Any) -> None:
        for _ in range(5):
            stream.send_answer(mad._frame())
        right(stream, frames)

    server._reply = answer
    try:
        return int(rpc.rpc_sync(1, asked_back, (number,), timeout=30))
    finally:
        server._reply = right


def _settled(before: dict[str, int]) -> dict[str, int]:
    """What the victim has when its connections have ended; strangers have ten seconds."""
    end = time.monotonic() + 30
    while True:
        after: dict[str, int] = rpc.rpc_sync(1, state)
        kept = [name for name in ("files", "leased") if after[name] > before[name] + 5]
        if after["threads"] <= before["threads"] + 20 and not kept:
            break
        assert time.monotonic() < end, (before, after, rpc.rpc_sync(1, open_files))
        time.sleep(0.1)
    assert after["bytes"] < before["bytes"] + MOST_MORE, (before, after)
    return after
