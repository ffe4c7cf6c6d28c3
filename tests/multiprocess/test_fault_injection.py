"""Fault injection: every fault, every caller of operations, and no leftovers."""

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
from torch.utils.flop_counter import FlopCounterMode

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
    Fault,
    FaultRunner,
    Result,
    crash,
    delay,
    disable_faults,
    enable_faults,
    fail,
    kill,
    skip,
    stop,
)
from tests.descriptors import list_descriptors
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def runner() -> Iterator[FaultRunner]:
    with FaultRunner(preload=["torch._dynamo"]) as runner:  # which DDP imports when it is created
        yield runner


def steps(count: int = 5, timeout: float = 20.0) -> list[float]:
    """Run steps of an all_reduce of ones and a barrier."""
    with phalanx.init(timeout=timeout):
        results = []
        for _ in range(count):
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            dist.barrier()
            results.append(tensor[0].item())
        return results


@pytest.mark.slow
def test_without_faults(runner: FaultRunner) -> None:
    result = runner.run(steps, 3, (2,))
    assert result.values == {rank: [3.0, 3.0] for rank in range(3)}
    assert (result.errors, result.fault_times, result.missed_faults) == ({}, {}, [])
    for rank in result:
        assert rank.returned
        assert rank.operations == ("all_reduce", "barrier") * 2
        assert rank.time <= time.monotonic()


def check_survivors(result: Result, victim: int, words: str, operation: str) -> None:
    (death,) = result.fault_times.values()
    for rank in result:
        if rank.rank != victim:
            assert isinstance(rank.error, PeerLost), result
            text = str(rank.error)
            assert operation in text
            assert f"rank {victim} (pid {result[victim].pid}) {words}" in text
            assert rank.time > death


@pytest.mark.parametrize("by", (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV))
def test_kill(runner: FaultRunner, by: signal.Signals) -> None:
    result = runner.run(steps, 3, faults=[kill(rank=1, nth=4, sig=by)])
    assert result[1].code == -by
    assert result[1].outcome is None
    assert len(result[1].operations) == 4
    check_survivors(result, 1, f"was killed by {by.name}", "barrier #4")


def test_crash(runner: FaultRunner) -> None:
    result = runner.run(steps, 3, faults=[crash(rank=0, nth=2, operation="all_reduce", code=7)])
    assert result[0].code == 7
    check_survivors(result, 0, "exited with code 7", "all_reduce #3")


def test_kill_in_the_middle(runner: FaultRunner) -> None:
    """The other rank arrives late, so the victim dies inside the operation."""
    faults = [kill(rank=0, nth=3, after=0.05), delay(rank=1, nth=3, seconds=0.3)]
    result = runner.run(steps, 2, faults=faults)
    killed, delayed = result.fault_times.values()
    assert killed - delayed > 0.02
    assert isinstance(result.errors[1], PeerLost), result
    # The victim had published its part of operation 3.
    assert "barrier #4" in str(result.errors[1])


def test_fail(runner: FaultRunner) -> None:
    result = runner.run(steps, 2, faults=[fail(rank=1, nth=3, error=MemoryError("no more"))])
    assert isinstance(result.errors[1], MemoryError)
    assert result[1].code == 1
    assert "MemoryError: no more" in result[1].stderr
    # `phalanx.init` as a context manager notifies the others immediately.
    check_survivors(result, 1, "failed with MemoryError: no more", "all_reduce #")


def test_stop_and_resume(runner: FaultRunner) -> None:
    fault = stop(rank=0, nth=2, seconds=0.3)
    result = runner.run(steps, 2, faults=[fault])
    assert result.values == {0: [2.0] * 5, 1: [2.0] * 5}
    for rank in result:
        assert rank.time - result.fault_times[fault] > 0.3


def test_stop_for_good(runner: FaultRunner) -> None:
    result = runner.run(steps, 3, (5, 0.5), faults=[stop(rank=2, nth=3)])
    assert result[2].code == -signal.SIGKILL
    assert not result[2].hung
    for rank in (0, 1):
        assert isinstance(result.errors[rank], CollectiveTimeout), result
        assert f"rank 2 (pid {result[2].pid})" in str(result.errors[rank])


def test_delay(runner: FaultRunner) -> None:
    fault = delay(rank=1, nth=2, operation="barrier", seconds=0.2)
    result = runner.run(steps, 2, faults=[fault])
    assert result.values == {0: [2.0] * 5, 1: [2.0] * 5}
    assert all(rank.time - result.fault_times[fault] > 0.2 for rank in result)


def test_skip(runner: FaultRunner) -> None:
    result = runner.run(steps, 3, faults=[skip(rank=1, nth=1)])
    for rank in result:
        assert isinstance(rank.error, CollectiveMismatch), result
        assert "all_reduce #1 float32[3] SUM" in str(rank.error)
        assert "barrier #1" in str(rank.error)


def call_all_operations() -> list[str]:
    """Call operations by every interface of PyTorch."""
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


def test_every_operation_counts(runner: FaultRunner) -> None:
    result = runner.run(call_all_operations, 2)
    first, second = (rank.operations for rank in result)
    assert result.values == {0: [], 1: []}, result
    # Operations of the constructor of DDP come before.
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


def call_under_observers() -> None:
    """Call one operation with a profiler, and one with a dispatch mode that observes it."""
    with phalanx.init():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            dist.all_reduce(torch.ones(2))
        with FlopCounterMode(display=False):
            dist.broadcast(torch.ones(2), 0)


def test_an_observed_operation_counts_once(runner: FaultRunner) -> None:
    result = runner.run(call_under_observers, 2)
    assert result.values == {0: None, 1: None}, result
    assert [rank.operations for rank in result] == [("all_reduce", "broadcast")] * 2


@pytest.mark.slow
def test_a_kill_at_every_operation(runner: FaultRunner) -> None:
    """As in the documentation: count the operations once, then kill the rank at each."""
    baseline = runner.run(call_all_operations, 2)
    for at, name in enumerate(baseline[1].operations, 1):
        result = runner.run(call_all_operations, 2, faults=[kill(rank=1, nth=at)])
        assert result[1].operations == baseline[1].operations[:at]
        assert result[1].code == -signal.SIGKILL
        # A send completes when the message is in shared memory.
        if at < len(baseline[1].operations) or name != "recv":
            # DDP's reducer keeps only the text of exceptions.
            error = result[0].error
            assert "PeerLost" in f"{type(error)}: {error}", (at, name, str(result))


def skip_operation(kind: str) -> list[float]:
    """Skip an operation on rank 1, where it appears to have completed."""
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
def test_a_skipped_operation_changes_nothing(runner: FaultRunner, kind: str) -> None:
    result = runner.run(skip_operation, 2, (kind,), faults=[skip(rank=1, nth=1, operation=kind)])
    assert result[1].value == [5.0] * 4, result
    if kind != "recv":
        assert isinstance(result.errors[0], CollectiveMismatch), result
        assert "rank 1" in str(result.errors[0])
        assert "has left the group" in str(result.errors[0])


def hang() -> None:
    with phalanx.init() as session:
        if session.rank == 1:
            threading.Event().wait()
        dist.barrier()


def test_a_hang_is_killed(runner: FaultRunner) -> None:
    with pytest.raises(LaunchError, match=r"ranks 0, 1 were still running after 1 s") as caught:
        runner.run(hang, 2, timeout=1)
    # The message contains the stacks of their threads.
    assert str(caught.value).count("in hang") == 2, caught.value
    assert "rank 1 (pid " in str(caught.value)


def test_a_missed_fault(runner: FaultRunner) -> None:
    fault = kill(rank=1, nth=6, operation="barrier")
    words = (
        r"kill\(rank=1, nth=6, operation='barrier', sig=SIGKILL\) was not injected: "
        r"rank 1 made 5 barrier op"
    )
    with pytest.raises(UsageError, match=words):
        runner.run(steps, 2, faults=[fault])
    result = runner.run(steps, 2, faults=[fault], allow_missed=True)
    assert result.missed_faults == [fault]


def on_gloo() -> None:
    dist.init_process_group("gloo")
    dist.barrier()


def test_faults_of_another_backend_do_not_happen(runner: FaultRunner) -> None:
    with pytest.raises(UsageError, match="0 operations in groups of Phalanx"):
        runner.run(on_gloo, 2, faults=[kill(0, 1)], env={"GLOO_SOCKET_IFNAME": "lo"})


class UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("stubborn")


def return_or_raise(case: str) -> object:
    print("text on stdout")
    if case == "lock":
        return threading.Lock()
    if case == "exit":
        sys.exit(3)
    raise UnpicklableError(1, 2)


@pytest.mark.parametrize(
    ("case", "kind", "words", "code"),
    [
        ("lock", TypeError, "the result, of type lock, can't be pickled", 0),
        ("exit", SystemExit, "3", 3),
        ("stubborn", RuntimeError, "UnpicklableError: stubborn", 1),
    ],
)
def test_results_that_cannot_be_pickled(
    runner: FaultRunner, case: str, kind: type[BaseException], words: str, code: int
) -> None:
    (rank,) = runner.run(return_or_raise, 1, (case,))
    assert type(rank.error) is kind
    assert words in str(rank.error)
    assert (rank.code, rank.returned) == (code, False)
    assert rank.stdout == "text on stdout\n"


def start_child() -> int:
    child = subprocess.Popen(["sleep", "1000"])
    os.kill(os.getpid(), signal.SIGKILL)
    return child.pid


def list_job_records() -> list[str]:
    path = os.environ["PHALANX_JOBS_DIR"]
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def test_no_process_file_or_record_remains(
    runner: FaultRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixture of all tests checks for remaining processes."""
    # Other tests use the default folder at the same time.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner.run(steps, 1, (1,))  # starts the server, to which two descriptors belong
    descriptors, jobs = len(list_descriptors()), list_job_records()
    (rank,) = runner.run(start_child, 1)
    assert rank.code == -signal.SIGKILL
    with pytest.raises(LaunchError):
        runner.run(hang, 2, timeout=0.3)
    wait_for(lambda: len(list_descriptors()) <= descriptors)
    assert list_job_records() == jobs
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_server_ends_with_its_client() -> None:
    script = (
        "from phalanx.testing import FaultRunner; runner = FaultRunner()\n"
        "print(runner.run(lambda: 5, 2).values, flush=True); import os; os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("{0: 5, 1: 5}\n", -signal.SIGKILL)


def test_a_closed_runner() -> None:
    runner = FaultRunner()
    runner.close()
    runner.close()
    with pytest.raises(LaunchError, match="has ended"):
        runner.run(steps, 2)


WRONG: dict[str, tuple[Callable[[FaultRunner], object], str]] = {
    "no function": (lambda runner: runner.run(3, 2), "fn is 3: expected a function"),  # type: ignore[arg-type]
    "no ranks": (
        lambda runner: runner.run(steps, 0),
        "nprocs is 0: expected an integer, at least 1",
    ),
    "no tuple": (lambda runner: runner.run(steps, 1, 5), r"args is 5: expected a tuple"),  # type: ignore[arg-type]
    "no time": (lambda runner: runner.run(steps, 1, timeout=0), "timeout is 0: expected seconds"),
    "fault of an unknown rank": (
        lambda runner: runner.run(steps, 2, faults=[kill(2, 1)]),
        "rank 2, expected 0 to 1",
    ),
    "unpicklable": (
        lambda runner: runner.run(steps, 2, (threading.Lock(),)),
        "can't pickle the call",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(runner: FaultRunner, name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        call(runner)


def enable_faults_and_run(faults: list[Fault]) -> str:
    enable_faults(faults)
    try:
        with phalanx.init():
            dist.barrier()
    except PeerLost as error:
        return str(error)
    return "nothing"


def test_faults_under_another_launcher() -> None:
    with pytest.raises(LaunchError, match=r"rank 1 \(pid \d+\) exited with code 9"):
        phalanx.launch(enable_faults_and_run, 2, ([crash(1, 1, code=9)],), timeout=60)


def wrapped_methods(enabled: bool) -> set[str]:
    disable_faults()
    if enabled:
        enable_faults([])
    with phalanx.init():
        group: Any = dist.group.WORLD
        dist.barrier()
    assert type(group) is ProcessGroup
    return {"run", "send", "recv"} & (vars(group._executor).keys() | vars(group._messages).keys())


def test_without_faults_no_method_of_the_group_is_wrapped(runner: FaultRunner) -> None:
    assert runner.run(wrapped_methods, 1, (False,))[0].value == set()
    assert len(runner.run(wrapped_methods, 1, (True,))[0].value) == 3
