"""The attributes of exceptions after real failures; they come from other processes by pickling."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import rpc
from tests.ranks import RankOutcome, RankServer, connect_ranks, wait_for_file

PAGE = Path(__file__).parents[2] / "docs/reference/exceptions.md"
# Letters of the hosts: one host, or two with two ranks each.
HOSTS = pytest.mark.parametrize("hosts", ["", "aabb"], ids=["one host", "two hosts"])


def kill_a_member() -> None:
    """Rank 3 dies in a group of the ranks 1 and 3, where it is rank 1."""
    group = dist.new_group([1, 3])
    dist.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        dist.all_reduce(torch.zeros(10), group=group)
    wait_for_file("end", 0.0 if dist.get_rank() == 1 else 40.0)


def error_of(outcome: RankOutcome, kind: type[phalanx.PhalanxError]) -> phalanx.PhalanxError:
    error = outcome.error
    assert isinstance(error, phalanx.PhalanxError), outcome.report()
    assert type(error) is kind
    return error


@HOSTS
def test_a_killed_rank(ranks: RankServer, hosts: str) -> None:
    running = ranks.start(4, kill_a_member, hosts=hosts)
    running.wait(60, [1, 3])
    (running.folder / "end").touch()
    error = error_of(running.join()[1], phalanx.PeerLost)
    assert error.ranks == (3,)
    assert error.operation == "all_reduce #1"
    assert error.group
    assert error.seconds is None


def disagree() -> None:
    connect_ranks()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(3))
    else:
        dist.broadcast(torch.zeros(3), 0)


def come_late() -> None:
    connect_ranks()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(3))
    else:
        wait_for_file("never", 20.0)


def abort_in_rank_1() -> None:
    connect_ranks()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(3), 1)
    else:
        phalanx.abort(reason="loss is NaN")


def wait_for_a_work() -> None:
    connect_ranks()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(3), async_op=True).wait(timedelta(seconds=0.2))
    else:
        wait_for_file("never", 20.0)


@pytest.mark.parametrize("hosts", ["", "ab"], ids=["one host", "two hosts"])
def test_a_mismatch(ranks: RankServer, hosts: str) -> None:
    for outcome in ranks.start(2, disagree, hosts=hosts).join():
        error = error_of(outcome, phalanx.CollectiveMismatch)
        assert sorted(error.ranks) == [0, 1]
        assert error.operation == ["all_reduce #2", "broadcast #2"][outcome.rank]


@pytest.mark.parametrize("function", [come_late, wait_for_a_work])
@pytest.mark.parametrize("hosts", ["", "ab"], ids=["one host", "two hosts"])
def test_a_timeout(ranks: RankServer, hosts: str, function: object) -> None:
    running = ranks.start(2, function, timeout=1.0, hosts=hosts)  # type: ignore[arg-type]
    running.wait(60, [0])
    running.signal(1, signal.SIGKILL)
    error = error_of(running.join()[0], phalanx.CollectiveTimeout)
    # A wait that ends before the operation does cannot ask other hosts.
    assert error.ranks == (() if hosts and function is wait_for_a_work else (1,))
    assert error.operation == "all_reduce #2"
    assert error.seconds == (1.0 if function is come_late else 0.2)


@pytest.mark.parametrize("hosts", ["", "ab"], ids=["one host", "two hosts"])
def test_an_abort(ranks: RankServer, hosts: str) -> None:
    error = error_of(ranks.start(2, abort_in_rank_1, hosts=hosts).join()[0], phalanx.Aborted)
    assert error.ranks == (1,)
    assert error.operation == "recv"


def fail_on_rank_1() -> None:
    with phalanx.init() as session:
        dist.barrier()
        if session.rank == 1:
            raise ValueError("a bug")
        dist.barrier()


@pytest.mark.slow
def test_launch_names_rank_and_job() -> None:
    with pytest.raises(phalanx.LaunchError) as raised:
        phalanx.launch(fail_on_rank_1, 2)
    error = raised.value
    assert error.ranks == (1,)
    assert error.job
    assert f"phalanx explain {error.job}" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_launch_names_the_ranks_of_a_timeout() -> None:
    with pytest.raises(phalanx.LaunchError) as raised:
        phalanx.launch(time.sleep, 2, (60,), timeout=0.5)
    assert raised.value.ranks == (0, 1)
    assert raised.value.seconds == 0.5


def catch_peer_lost() -> tuple[object, ...]:
    """Rank 1 is killed; return the attributes that rank 0 sees, or the error of its call."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker-{rank}")
    if rank == 1:
        rpc.shutdown()
        return ()
    pid = rpc.rpc_sync("worker-1", os.getpid)
    pending = rpc.rpc_async("worker-1", time.sleep, (60,))
    with pytest.raises(phalanx.CallTimeout) as late:
        rpc.rpc_sync("worker-1", time.sleep, (60,), timeout=0.2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost) as lost:
        pending.wait()
    with pytest.raises(phalanx.PeerLost) as lost_before:
        rpc.rpc_sync("worker-1", os.getpid)
    rpc.shutdown(graceful=False)
    timed, found, again = late.value, lost.value, lost_before.value
    return timed.ranks, timed.seconds, timed.operation, found.ranks, found.operation, again.ranks


def test_a_lost_worker(ranks: RankServer) -> None:
    outcome = ranks.start(2, catch_peer_lost).join()[0]
    late, seconds, call, lost, operation, again = outcome.value
    assert (late, lost, again) == ((1,), (1,), (1,))
    assert seconds == 0.2
    assert "sleep" in call
    assert "sleep" in operation


def raise_timeout() -> None:
    raise phalanx.CollectiveTimeout("late", ranks=[5], operation="barrier #3", seconds=1.5)


def catch_remote_error() -> tuple[object, ...]:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker-{rank}")
    found: tuple[object, ...] = ()
    if rank == 0:
        with pytest.raises(phalanx.CollectiveTimeout, match="late") as raised:
            rpc.rpc_sync("worker-1", raise_timeout)
        found = raised.value.ranks, raised.value.operation, raised.value.seconds
    rpc.shutdown()
    return found


def test_an_error_of_a_remote_function(ranks: RankServer) -> None:
    found = ranks.run(2, catch_remote_error)[0]
    assert found == ((5,), "barrier #3", 1.5)


def collect_as_documented(source: str) -> dict[str, int]:
    """Rank 0 calls the function of the documentation after worker 2 has been killed."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker-{rank}")
    if rank != 0:
        wait_for_file("end", 40.0)
        rpc.shutdown(graceful=False)
        return {}
    os.kill(rpc.rpc_sync("worker-2", os.getpid), signal.SIGKILL)
    names: dict[str, Any] = {}
    exec(source, names)
    results: dict[str, int] = names["collect"](["worker-1", "worker-2"], os.getpid)
    Path(os.environ["FOLDER"], "end").touch()
    rpc.shutdown(graceful=False)
    return results


def test_the_example_of_the_documentation(ranks: RankServer) -> None:
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert source is not None
    running = ranks.start(3, collect_as_documented, source[1])
    outcomes = running.join()
    assert outcomes[0].value == {"worker-1": outcomes[1].pid}
    assert "continuing without worker-2, worker 2: " in outcomes[0].stdout
