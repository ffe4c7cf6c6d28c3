"""monitored_barrier names the missing ranks, in the wording that programs for Gloo search for."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.errors import CollectiveTimeout
from tests.ranks import RankServer


def barrier(seconds: float, wait_all_ranks: bool = False) -> None:
    dist.group.WORLD.monitored_barrier(timedelta(seconds=seconds), wait_all_ranks=wait_all_ranks)


def all_arrive() -> None:
    barrier(10)
    barrier(10, wait_all_ranks=True)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_all_arrive(ranks: RankServer, size: int) -> None:
    ranks.run(size, all_arrive)


def some_arrive(words: dict[int, str], wait_all_ranks: bool) -> None:
    rank, folder = dist.get_rank(), Path(os.environ["FOLDER"])
    if rank in words:
        with pytest.raises(CollectiveTimeout, match=words[rank]):
            barrier(0.5, wait_all_ranks)
        (folder / f"gave up {rank}").touch()
    # A rank that leaves earlier is not late but gone, which is reported at once.
    while not all((folder / f"gave up {other}").exists() for other in words):
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("words", "wait_all_ranks"),
    [
        (
            {
                0: r"waited for rank 1 \(pid .*\. Rank 1 failed to pass monitoredBarrier",
                2: "Rank 2 successfully reached monitoredBarrier, but received errors while "
                "waiting for send/recv from rank 0",
            },
            False,
        ),
        ({0: "Rank 1 failed to pass monitoredBarrier"}, False),
        ({0: "Ranks 1, 2 failed to pass monitoredBarrier"}, True),
    ],
)
def test_some_arrive(ranks: RankServer, words: dict[int, str], wait_all_ranks: bool) -> None:
    ranks.run(3, some_arrive, words, wait_all_ranks)


def zero_timeout() -> None:
    with pytest.raises(CollectiveTimeout, match="timed out in monitoredBarrier"):
        barrier(0)
    barrier(10)


def test_zero_timeout(ranks: RankServer) -> None:
    ranks.run(2, zero_timeout)
