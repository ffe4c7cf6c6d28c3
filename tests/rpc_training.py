"""What tests of training through calls share: workers, models, and batches."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Iterator

import psutil
import torch
from torch import Tensor, nn

from phalanx import rpc
from phalanx.rpc.autograd.container import graph

ROWS, WIDTH, CLASSES, BATCH = 200, 8, 5, 32
STEPS = 4
LIMIT = 20.0


@contextlib.contextmanager
def worker() -> Iterator[int]:
    """This process as a worker; names are "w0", "w1", and so on."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}")
    yield rank
    rpc.shutdown()


@contextlib.contextmanager
def little_address_space(room: int) -> Iterator[None]:
    """Let this process map no more than `room` bytes besides what it has mapped."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + room
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def wait_until_free(of: list[int]) -> None:
    """Wait until nothing is kept for a backward pass on some workers."""
    end = time.monotonic() + LIMIT
    while left := {who: left for who in of if (left := rpc.rpc_sync(who, pending))}:
        assert time.monotonic() < end, left
        time.sleep(0.01)


def pending() -> int:
    gc.collect()  # exceptions hold frames, and frames exceptions
    return graph().pending


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        rows = torch.randint(ROWS, (BATCH, 3), generator=generator)
        yield rows, torch.randint(CLASSES, (BATCH,), generator=generator)


def table(seed: int) -> nn.EmbeddingBag:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, dtype=torch.float64)


def dense(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 16, dtype=torch.float64),
        nn.Tanh(),
        nn.Linear(16, CLASSES, dtype=torch.float64),
    )


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 4, dtype=torch.float64)


def made_parameter() -> nn.Parameter:
    return nn.Parameter(torch.arange(1.0, 5.0, dtype=torch.float64))
