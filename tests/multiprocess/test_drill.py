"""The failure drill: every fault, wherever an operation comes from, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import phalanx
from phalanx.backend.process_group import ProcessGroup
from phalanx.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    LaunchError,
    PeerLost,
    UsageError,
)
from phalanx.testing import (
    Drill,
    Fault,
    Result,
    arm,
    crash,
    delay,
    disarm,
    fail,
    kill,
    skip,
    stop,
)


@pytest.fixture(scope="module")
def drill() -> Iterator[Drill]:
    with Drill(preload=["torch._dynamo"]) as drill:  # which DDP imports when it is made
        yield drill


def steps(count: int = 5, timeout: float = 20.0) -> list[float]:
    """Each step an all_reduce of ones and a barrier."""
    with phalanx.init(timeout=timeout):
        results = []
        for _ in range(count):
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            dist.barrier()
            results.append(tensor[0].item())
        return results


def test_without_faults(drill: Drill) -> None:
    result = drill.run(steps, 3, (2,))
    assert result.values == {rank: [3.0, 3.0] for rank in range(3)}
    assert (result.errors, result.struck, result.missed) == ({}, {}, [])
    for rank in result:
        assert rank.returned
        assert rank.operations == ("all_reduce", "barrier") * 2
        assert rank.time <= time.monotonic()


def lost(result: Result, victim: int, words: str, operation: str) -> None:
    (death,) = result.struck.values()
    for rank in result:
        if rank.rank != victim:
            assert isinstance(rank.error, PeerLost), result
            text = str(rank.error)
            assert operation in text
            assert f"rank {victim} (pid {result[victim].pid}) {words}" in text
            assert 0 < rank.time - death < 1


@pytest.mark.parametrize("by", (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV))
def test_kill(drill: Drill, by: signal.Signals) -> None:
    result = drill.run(steps, 3, faults=[kill(rank=1, at=4, by=by)])
    assert result[1].code == -by
    assert result[1].outcome is None
    assert len(result[1].operations) == 4
    lost(result, 1, f"was killed by {by.name}", "barrier #4")


def test_crash(drill: Drill) -> None:
    result = drill.run(steps, 3, faults=[crash(rank=0, at=2, of="all_reduce", code=7)])
    assert result[0].code == 7
    lost(result, 0, "exited with code 7", "all_reduce #3")


def test_kill_in_the_middle(drill: Drill) -> None:
    """The other rank comes late, so the victim is inside of the operation when it dies."""
    faults = [kill(rank=0, at=3, after=0.05), delay(rank=1, at=3, seconds=0.3)]
    result = drill.run(steps, 2, faults=faults)
    killed, delayed = result.struck.values()
    assert killed - delayed > 0.02
    assert isinstance(result.errors[1], PeerLost), result
    # What it had published before its end counted.
    assert "barrier #4" in str(result.errors[1])


def test_fail(drill: Drill) -> None:
    result = drill.run(steps, 2, faults=[fail(rank=1, at=3, error=MemoryError("no more"))])
    assert isinstance(result.errors[1], MemoryError)
    assert result[1].code == 1
    assert "MemoryError: no more" in result[1].stderr
    # `phalanx.init` as a context manager tells the others at once.
    lost(result, 1, "failed with MemoryError: no more", "all_reduce #")


def test_stop_and_go_on(drill: Drill) -> None:
    fault = stop(rank=0, at=2, seconds=0.3)
    result = drill.run(steps, 2, faults=[fault])
    assert result.values == {0: [2.0] * 5, 1: [2.0] * 5}
    for rank in result:
        assert rank.time - result.struck[fault] > 0.3


def test_stop_for_good(drill: Drill) -> None:
    result = drill.run(steps, 3, (5, 0.5), faults=[stop(rank=2, at=3)])
    assert result[2].code == -signal.SIGKILL
    assert not result[2].hung
    for rank in (0, 1):
        assert isinstance(result.errors[rank], CollectiveTimeout), result
        assert f"rank 2 (pid {result[2].pid})" in str(result.errors[rank])


def test_delay(drill: Drill) -> None:
    fault = delay(rank=1, at=2, of="barrier", seconds=0.2)
    result = drill.run(steps, 2, faults=[fault])
    assert result.values == {0: [2.0] * 5, 1: [2.0] * 5}
    assert all(rank.time - result.struck[fault] > 0.2 for rank in result)


def test_skip(drill: Drill) -> None:
    result = drill.run(steps, 3, faults=[skip(rank=1, at=1)])
    for rank in result:
        assert isinstance(rank.error, CollectiveMismatch), result
        assert "all_reduce #1 float32[3] SUM" in str(rank.error)
        assert "barrier #1" in str(rank.error)


def in_all_ways() -> list[str]:
    """Every way in which PyTorch comes to an operation."""
    with phalanx.init() as session:
        peer = 1 - session.rank
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum()
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()
        dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))
        dist.all_reduce_coalesced([torch.ones(2), torch.ones(2)])
        pair = [
            dist.P2POp(dist.isend, torch.ones(1), peer),
            dist.P2POp(dist.irecv, torch.ones(1), peer),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        if session.rank == 0:
            dist.send(torch.ones(1), peer)
        else:
            dist.recv(torch.ones(1))
        dist.monitored_barrier()
    return []


def test_every_operation_counts(drill: Drill) -> None:
    result = drill.run(in_all_ways, 2)
    first, second = (rank.operations for rank in result)
    assert result.values == {0: [], 1: []}, result
    # What DDP does when it is made comes before.
    assert first[-9:] == (
        "all_reduce",  # DDP's reducer
        "all_reduce",
        "all_reduce",
        "all_gather_single",
        "all_reduce_coalesced",
        "send",
        "recv",
        "send",
        "monitored_barrier",
    )
    assert second == (*first[:-2], "recv", "monitored_barrier")


def test_a_kill_at_every_operation(drill: Drill) -> None:
    """As the documentation has it: count them once, then die at each."""
    calm = drill.run(in_all_ways, 2)
    for at, name in enumerate(calm[1].operations, 1):
        result = drill.run(in_all_ways, 2, faults=[kill(rank=1, at=at)])
        assert result[1].operations == calm[1].operations[:at]
        assert result[1].code == -signal.SIGKILL
        # A send is done when it stands in shared memory.
        if at < len(calm[1].operations) or name != "recv":
            # DDP's reducer knows exceptions by their words alone.
            error = result[0].error
            assert "PeerLost" in f"{type(error)}: {error}", (at, name, str(result))


def skipped(kind: str) -> list[float]:
    """Rank 1 leaves its operation out, and thinks that it has done it."""
    with phalanx.init(timeout=1) as session:
        tensor = torch.full((2, 2), 5.0).t()  # not contiguous
        if kind == "recv":
            work = None
            if session.rank == 1:
                work = dist.irecv(tensor, 0)
                assert work.get_future().wait()[0] is tensor
        elif kind == "send":
            if session.rank == 1:
                dist.send(tensor, 0)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            if session.rank == 1:
                assert work.get_future().wait()[0] is tensor
                assert work.is_completed()
                work.wait()
        if session.rank == 1:
            return tensor.flatten().tolist()
        if kind == "send":
            dist.recv(torch.ones(4), 1)
        elif work is not None:
            work.wait()
        return []


@pytest.mark.parametrize("kind", ("recv", "send", "all_reduce"))
def test_a_skipped_operation_changes_nothing(drill: Drill, kind: str) -> None:
    result = drill.run(skipped, 2, (kind,), faults=[skip(rank=1, at=1, of=kind)])
    assert result[1].value == [5.0] * 4, result
    if kind != "recv":
        assert isinstance(result.errors[0], CollectiveMismatch), result
        assert "rank 1" in str(result.errors[0])
        assert "has left the group" in str(result.errors[0])


def hanging() -> None:
    with phalanx.init() as session:
        if session.rank == 1:
            threading.Event().wait()
        dist.barrier()


def test_a_hang_is_bounded(drill: Drill) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"after 1 s these ranks still ran: 0, 1") as caught:
        drill.run(hanging, 2, timeout=1)
    assert time.monotonic() - start < 10
    # Where each of them was: the stacks of their threads.
    assert str(caught.value).count("in hanging") == 2, caught.value
    assert "rank 1 (pid " in str(caught.value)


def test_a_fault_that_does_not_happen(drill: Drill) -> None:
    fault = kill(rank=1, at=6, of="barrier")
    words = (
        r"kill\(rank=1, at=6, of='barrier', by=SIGKILL\) didn't happen: rank 1 made 5 barrier op"
    )
    with pytest.raises(UsageError, match=words):
        drill.run(steps, 2, faults=[fault])
    result = drill.run(steps, 2, faults=[fault], may_miss=True)
    assert result.missed == [fault]


def on_gloo() -> None:
    dist.init_process_group("gloo")
    dist.barrier()


def test_faults_of_another_backend_do_not_happen(drill: Drill) -> None:
    with pytest.raises(UsageError, match="0 operations in groups of Phalanx"):
        drill.run(on_gloo, 2, faults=[kill(0, 1)], env={"GLOO_SOCKET_IFNAME": "lo"})


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("stubborn")


def hands_back(what: str) -> object:
    print("said on stdout")
    if what == "lock":
        return threading.Lock()
    if what == "exit":
        sys.exit(3)
    raise Stubborn(1, 2)


@pytest.mark.parametrize(
    ("what", "kind", "words", "code"),
    [
        ("lock", TypeError, "the result, of type lock, can't be pickled", 0),
        ("exit", SystemExit, "3", 3),
        ("stubborn", RuntimeError, "Stubborn: stubborn", 1),
    ],
)
def test_what_a_rank_hands_back(
    drill: Drill, what: str, kind: type[BaseException], words: str, code: int
) -> None:
    (rank,) = drill.run(hands_back, 1, (what,))
    assert type(rank.error) is kind
    assert words in str(rank.error)
    assert (rank.code, rank.returned) == (code, False)
    assert rank.stdout == "said on stdout\n"


def starts_something() -> int:
    child = subprocess.Popen(["sleep", "1000"])
    os.kill(os.getpid(), signal.SIGKILL)
    return child.pid


def kept_jobs() -> list[str]:
    path = os.environ["PHALANX_JOBS_DIR"]
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def test_nothing_is_left_behind(
    drill: Drill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of the ranks' are looked for by a fixture of all tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # drills of other tests run at once
    descriptors, jobs = len(os.listdir("/proc/self/fd")), kept_jobs()
    (rank,) = drill.run(starts_something, 1)
    assert rank.code == -signal.SIGKILL
    with pytest.raises(LaunchError):
        drill.run(hanging, 2, timeout=0.3)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert kept_jobs() == jobs
    assert list(tmp_path.iterdir()) == []


def test_the_server_ends_with_its_client() -> None:
    script = (
        "from phalanx.testing import Drill; drill = Drill()\n"
        "print(drill.run(lambda: 5, 2).values, flush=True); import os; os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("{0: 5, 1: 5}\n", -signal.SIGKILL)


def test_a_closed_drill() -> None:
    drill = Drill()
    drill.close()
    drill.close()
    with pytest.raises(LaunchError, match="has ended"):
        drill.run(steps, 2)


WRONG: dict[str, tuple[Callable[[Drill], object], str]] = {
    "no function": (lambda drill: drill.run(3, 2), "fn is 3: expected a function"),  # type: ignore[arg-type]
    "no ranks": (lambda drill: drill.run(steps, 0), "ranks is 0: expected an integer, at least 1"),
    "no tuple": (lambda drill: drill.run(steps, 1, 5), r"args is 5: expected a tuple"),  # type: ignore[arg-type]
    "no time": (lambda drill: drill.run(steps, 1, timeout=0), "timeout is 0: expected seconds"),
    "fault of a rank that isn't there": (
        lambda drill: drill.run(steps, 2, faults=[kill(2, 1)]),
        "rank 2, expected 0 to 1",
    ),
    "unpicklable": (
        lambda drill: drill.run(steps, 2, (threading.Lock(),)),
        "the call can't be pickled",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(drill: Drill, name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        call(drill)


def armed_by_itself(faults: list[Fault]) -> str:
    arm(faults)
    try:
        with phalanx.init():
            dist.barrier()
    except PeerLost as error:
        return str(error)
    return "nothing"


def test_arming_under_another_launcher() -> None:
    with pytest.raises(LaunchError, match=r"rank 1 \(pid \d+\) exited with code 9"):
        phalanx.launch(armed_by_itself, 2, ([crash(1, 1, code=9)],), timeout=60)


def class_of_the_group(armed: bool) -> tuple[Any, bool]:
    disarm()
    if armed:
        arm([])
    with phalanx.init() as session:
        kind = type(dist.group.WORLD)
        dist.barrier()
    return kind.__name__, session.rank == 0


def test_without_faults_armed_nothing_is_in_the_way(drill: Drill) -> None:
    assert drill.run(class_of_the_group, 1, (False,))[0].value[0] == ProcessGroup.__name__
    assert drill.run(class_of_the_group, 1, (True,))[0].value[0] != ProcessGroup.__name__
