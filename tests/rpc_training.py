"""Shared helpers of the tests of training through calls: workers, models and batches."""

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
from phalanx.rpc.autograd.graph import graph

ROWS, WIDTH, CLASSES, BATCH = 200, 8, 5, 32
STEPS = 4
LIMIT = 20.0


@contextlib.contextmanager
def worker() -> Iterator[int]:
    """Run this process as a worker; names are "w0", "w1", and so on."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}")
    yield rank
    rpc.shutdown()


@contextlib.contextmanager
def limit_address_space(size: int) -> Iterator[None]:
    """Limit this process to mapping at most `size` more bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def wait_until_free(workers: list[int]) -> None:
    """Wait until these workers keep nothing for a backward pass."""
    deadline = time.monotonic() + LIMIT
    while kept := {each: count for each in workers if (count := rpc.rpc_sync(each, pending))}:
        assert time.monotonic() < deadline, kept
        time.sleep(0.01)


def pending() -> int:
    gc.collect()  # exceptions and frames refer to each other
    return graph().pending


def make_batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        rows = torch.randint(ROWS, (BATCH, 3), generator=generator)
        yield rows, torch.randint(CLASSES, (BATCH,), generator=generator)


def make_table(seed: int) -> nn.EmbeddingBag:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, dtype=torch.float64)


def make_dense(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 16, dtype=torch.float64),
        nn.Tanh(),
        nn.Linear(16, CLASSES, dtype=torch.float64),
    )


def make_linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 4, dtype=torch.float64)


def make_parameter() -> nn.Parameter:
    return nn.Parameter(torch.arange(1.0, 5.0, dtype=torch.float64))
