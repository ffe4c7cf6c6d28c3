"""monitored_barrier names who has not come, in the words that programs for Gloo look for."""

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


def all_come() -> None:
    barrier(10)
    barrier(10, wait_all_ranks=True)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_all_come(ranks: RankServer, size: int) -> None:
    ranks.run(size, all_come)


def some_come(words: dict[int, str], wait_all_ranks: bool) -> None:
    rank, folder = dist.get_rank(), Path(os.environ["FOLDER"])
    if rank in words:
        with pytest.raises(CollectiveTimeout, match=words[rank]):
            barrier(0.5, wait_all_ranks)
        (folder / f"gave up {rank}").touch()
    # Who leaves earlier is not late but gone, which is said at once.
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
def test_some_come(ranks: RankServer, words: dict[int, str], wait_all_ranks: bool) -> None:
    ranks.run(3, some_come, words, wait_all_ranks)


def no_time() -> None:
    with pytest.raises(CollectiveTimeout, match="timed out in monitoredBarrier"):
        barrier(0)
    barrier(10)


def test_no_time(ranks: RankServer) -> None:
    ranks.run(2, no_time)
