"""Ways to end `with phalanx.init()` on one rank, and the errors of the other ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.diagnosis import job_reader
from phalanx.errors import Aborted, CollectiveMismatch, PeerLost, PhalanxError
from phalanx.testing import FaultRunner, RankResult

VICTIM = 1


@pytest.fixture(scope="module")
def runner() -> Iterator[FaultRunner]:
    with FaultRunner() as runner:
        yield runner


def raises() -> None:
    raise ValueError("no such column")


def raises_lone_surrogate() -> None:
    raise FileNotFoundError("data-\udcff.bin")  # os.listdir returns such names


def interrupted() -> None:
    raise KeyboardInterrupt


# The end of the body, and the error of the other ranks.
ENDS: dict[str, tuple[Callable[[], object], type[PhalanxError], str]] = {
    "exception": (raises, PeerLost, "rank 1 (pid {pid}) failed with ValueError: no such column"),
    "no UTF-8": (
        raises_lone_surrogate,
        PeerLost,
        "rank 1 (pid {pid}) failed with FileNotFoundError: data-\\udcff.bin",
    ),
    "sys.exit(3)": (
        lambda: sys.exit(3),
        PeerLost,
        "rank 1 (pid {pid}) failed with SystemExit: 3",
    ),
    "sys.exit(0)": (
        lambda: sys.exit(0),
        CollectiveMismatch,
        "rank 1 (pid {pid}) has left the group",
    ),
    "Ctrl-C": (interrupted, Aborted, "rank 1 at {site}: its session ended with KeyboardInterrupt"),
}


def end_on_one_rank(how: str, in_flight: bool = False) -> float:
    """End the body of the victim, and return the time; the others wait for it."""
    start = 0.0
    try:
        with phalanx.init(timeout=20) as session:
            pair = dist.new_group()
            dist.barrier()
            if session.rank != VICTIM:
                dist.all_reduce(torch.zeros(3), group=pair if session.rank == 2 else None)
            if in_flight:
                dist.all_reduce(torch.zeros(3), async_op=True)
                dist.all_reduce(torch.zeros(3), group=pair, async_op=True)
            start = time.monotonic()
            ENDS[how][0]()
    except BaseException as error:
        if not in_flight or isinstance(error, PhalanxError):
            raise
    return start


def check_error(rank: RankResult, how: str, victim: RankResult) -> str:
    _, kind, words = ENDS[how]
    assert isinstance(rank.error, kind), rank
    text = str(rank.error)
    head, _, tail = words.partition("{site}")
    assert head.format(pid=victim.pid) in text, rank
    assert tail in text, rank
    return text


@pytest.mark.parametrize("how", ENDS)
def test_other_ranks_raise(runner: FaultRunner, how: str) -> None:
    result = runner.run(end_on_one_rank, 2, (how,))
    check_error(result[0], how, result[VICTIM])


def test_all_groups_at_once(runner: FaultRunner) -> None:
    """Ranks that wait in another group raise too, and so do the victim's own operations."""
    result = runner.run(end_on_one_rank, 3, ("exception", True))
    for rank in (0, 2):
        check_error(result[rank], "exception", result[VICTIM])


def test_caught_outside(runner: FaultRunner) -> None:
    """The process continues, and its flight recorder does not report a failure."""
    result = runner.run(caught_and_continued, 2)
    check_error(result[0], "exception", result[VICTIM])
    assert result[VICTIM].value == ("left", 1.0)


def caught_and_continued() -> tuple[str, float]:
    try:
        with phalanx.init(timeout=20) as session:
            dist.barrier()
            if session.rank != VICTIM:
                dist.barrier()
            raises()
    except ValueError:
        ending = job_reader.read_job().ranks[VICTIM].ending
    # It can form another group, alone.
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("phalanx", store=store, rank=0, world_size=1)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return ending, tensor.item()
