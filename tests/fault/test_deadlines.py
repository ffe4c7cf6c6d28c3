"""Deadlines hold in every form of every operation, and errors describe the missing ranks."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from phalanx.errors import CollectiveTimeout
from tests.fault_injection import calls
from tests.ranks import RankServer

SECONDS = 0.4
# Tolerance beyond the deadline, for a busy machine.
FORMS = [
    (kind, mode)
    for kind in calls.LINES
    for mode in (("blocking",) if kind in calls.BLOCKING else calls.MODES)
]


def timed_out_ranks() -> Path:
    return Path(os.environ["FOLDER"], "given up")


def rank_0_stays_away() -> bool:
    """Return whether this is rank 0, which returns once the others have timed out."""
    dist.barrier()
    if dist.get_rank() != 0:
        return False
    while len(list(timed_out_ranks().parent.glob("given up*"))) < dist.get_world_size() - 1:
        time.sleep(0.001)
    return True


def times_out(call: Callable[[], object], seconds: float, *words: str) -> None:
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        call()
    waited = time.monotonic() - start
    Path(f"{timed_out_ranks()}-{dist.get_rank()}").touch()
    assert waited >= seconds
    text = str(caught.value)
    for part in (f"until the timeout of {seconds:g} s on this rank", *words):
        assert part in text, text


def call_of(kind: str, mode: str) -> Callable[[], None]:
    """Return a call in which rank 1 waits for rank 0."""
    # All ranks depend on the root 0; it receives the messages.
    call = calls.Call(kind, count=20_000, root=int(kind == "any_source"), mode=mode)
    return calls.PreparedCall(call, dist.group.WORLD).run


def one_rank_is_missing(kind: str, mode: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    if rank_0_stays_away():
        return
    words = "rank 1 waited for rank 0 (pid ", "rank 0 is in its own code since "
    if kind == "any_source":
        words = ("rank 1 waited for any rank in recv float32[20000] from any rank",)
    times_out(call_of(kind, mode), SECONDS, *words)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("kind", "mode"), FORMS)
def test_the_groups_deadline(ranks: RankServer, kind: str, mode: str) -> None:
    ranks.run(2, one_rank_is_missing, kind, mode, timeout=SECONDS)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def options(kind: str, seconds: float, async_op: bool, **values: Any) -> Any:
    made = AllgatherOptions() if kind == "Allgather" else getattr(dist, f"{kind}Options")()
    made.timeout, made.asyncOp = timedelta(seconds=seconds), async_op
    for name, value in values.items():
        setattr(made, name, value)
    return made


# Calls of PyTorch's group methods, which accept a timeout per operation.
METHODS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "allreduce": ("Allreduce", lambda g, o: g.allreduce([ones(3)], o)),
    "reduce": ("Reduce", lambda g, o: g.reduce([ones(3)], o)),
    "broadcast": ("Broadcast", lambda g, o: g.broadcast([ones(3)], o)),
    "gather": ("Gather", lambda g, o: g.gather([], [ones(3)], o)),
    "scatter": ("Scatter", lambda g, o: g.scatter([ones(3)], [], o)),
    "allgather": ("Allgather", lambda g, o: g.allgather([[ones(3), ones(3)]], [ones(3)], o)),
    "all_gather_single": ("Allgather", lambda g, o: g.all_gather_single(ones(6), ones(3), o)),
    "allgather_coalesced": (
        "Allgather",
        lambda g, o: g.allgather_coalesced([[ones(3)], [ones(3)]], [ones(3)], o),
    ),
    "all_gather_single_coalesced": (
        "Allgather",
        lambda g, o: g.all_gather_single_coalesced([ones(6)], [ones(3)], o),
    ),
    "reduce_scatter": (
        "ReduceScatter",
        lambda g, o: g.reduce_scatter([ones(3)], [[ones(3), ones(3)]], o),
    ),
    "reduce_scatter_single": (
        "ReduceScatter",
        lambda g, o: g.reduce_scatter_single(ones(3), ones(6), o),
    ),
    "reduce_scatter_single_coalesced": (
        "ReduceScatter",
        lambda g, o: g.reduce_scatter_single_coalesced([ones(3)], [ones(6)], o),
    ),
    "allreduce_coalesced": (
        "AllreduceCoalesced",
        lambda g, o: g.allreduce_coalesced([ones(3), ones(4)], o),
    ),
    "alltoall": (
        "AllToAll",
        lambda g, o: g.alltoall([ones(3), ones(3)], [ones(3), ones(3)], o),
    ),
    "all_to_all_single": (
        "AllToAll",
        lambda g, o: g.all_to_all_single(ones(6), ones(6), [], [], o),
    ),
    "barrier": ("Barrier", lambda g, o: g.barrier(o)),
}


def operation_timeout(method: str, async_op: bool) -> None:
    if rank_0_stays_away():
        return
    kind, call = METHODS[method]
    group: Any = dist.group.WORLD
    given = options(kind, SECONDS, async_op)
    times_out(lambda: call(group, given).wait(), SECONDS, "rank 1 waited for rank 0 (pid ")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("async_op", (False, True))
@pytest.mark.parametrize("method", METHODS)
def test_the_deadline_of_one_operation(ranks: RankServer, method: str, async_op: bool) -> None:
    """The timeout of the group is 20 s."""
    ranks.run(2, operation_timeout, method, async_op)


def message_timeout(how: str) -> None:
    if rank_0_stays_away():
        return
    works: dict[str, Callable[[], Any]] = {
        "irecv": lambda: dist.irecv(ones(3), 0),
        "isend": lambda: dist.isend(ones(2**20), 0),
        "irecv from any": lambda: dist.irecv(ones(3)),
    }
    work = works[how]()
    words = "recv" if "recv" in how else "send"
    times_out(lambda: work.wait(timedelta(seconds=SECONDS)), SECONDS, f"in {words} float32[")


@pytest.mark.parametrize("how", ("irecv", "isend", "irecv from any"))
def test_the_deadline_of_one_message(ranks: RankServer, how: str) -> None:
    ranks.run(2, message_timeout, how)


def queue_behind_another() -> None:
    """Queue an operation behind one whose deadline passes: both fail for that reason."""
    if rank_0_stays_away():
        return
    works: list[dist.Work] = []

    def wait_for_second() -> None:
        works.extend(dist.all_reduce(ones(size), async_op=True) for size in (3, 4))
        works[1].wait()

    times_out(wait_for_second, SECONDS, "all_reduce #2 float32[3]")
    with pytest.raises(CollectiveTimeout, match="waited for rank 0"):
        works[0].wait()
    for work in works:
        assert isinstance(work.exception(), CollectiveTimeout)


def test_queued_operation(ranks: RankServer) -> None:
    ranks.run(2, queue_behind_another, timeout=SECONDS)


def stopped(kind: str, mode: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    call_of(kind, mode)()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", [kind for kind in calls.LINES if kind != "any_source"])
def test_a_stopped_rank_is_named_at_the_deadline(ranks: RankServer, kind: str) -> None:
    mode = "blocking" if kind in calls.BLOCKING else "future"
    # Messages of rank 0 are for rank 1 only.
    size = 2 if kind in calls.MESSAGES else 3
    run = ranks.start(size, stopped, kind, mode, timeout=SECONDS)
    assert run.wait(60, range(1, size)) == []
    first, *others = run.collect()
    for rank in others:
        assert isinstance(rank.error, CollectiveTimeout), rank.report()
        assert f"rank 0 (pid {first.pid})" in str(rank.error), rank.report()
        assert "rank 0 is stopped by a signal (SIGSTOP)" in str(rank.error), rank.report()


def all_missing_are_named(wait_all_ranks: bool) -> str:
    dist.barrier()
    if dist.get_rank() in (1, 3):
        while not timed_out_ranks().exists():
            time.sleep(0.001)
        return ""
    with pytest.raises(CollectiveTimeout) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=SECONDS), wait_all_ranks=wait_all_ranks)
    if dist.get_rank() == 0:
        timed_out_ranks().touch()
    while not timed_out_ranks().exists():
        time.sleep(0.001)
    return str(caught.value)


@pytest.mark.parametrize("wait_all_ranks", (False, True))
def test_monitored_barrier_names_all_missing(ranks: RankServer, wait_all_ranks: bool) -> None:
    run = ranks.start(4, all_missing_are_named, wait_all_ranks)
    ended = run.join()
    for rank in (0, 2):
        text = ended[rank].value
        for missing in (1, 3):
            assert f"rank {missing} (pid {ended[missing].pid})" in text, text
            assert f"rank {missing} is in its own code since barrier #1" in text, text
    words = "Ranks 1, 3 failed" if wait_all_ranks else "Rank 1 failed"
    assert f"{words} to pass monitoredBarrier" in ended[0].value
