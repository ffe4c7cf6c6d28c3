"""Groups that cannot be formed: wrong rank, world size or address, or missing ranks."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import phalanx
from phalanx.errors import CollectiveTimeout, UsageError
from phalanx.launcher import store as launcher_store
from tests.ports import find_free_port
from tests.ranks import RankServer
from tests.waiting import once_blocked, wait_for


def init(rank: int, world_size: int, *, url: str = "", seconds: float = 10) -> None:
    dist.init_process_group(
        "phalanx",
        init_method=url or f"file://{os.environ['FOLDER']}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )


def rank_is(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="rank") as caught:
        init(rank, world_size)
    assert str(rank) in str(caught.value) or rank < 0


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (7, 2), (1, 1), (-1, 2), (-5, 2)])
def test_rank_outside_of_the_world(ranks: RankServer, rank: int, world_size: int) -> None:
    ranks.run(1, rank_is, rank, world_size, timeout=None)


def uncaught_rank() -> None:
    init(5, 2)


def test_one_clear_message(ranks: RankServer) -> None:
    (ended,) = ranks.start(1, uncaught_rank, timeout=None).join()
    assert ended.code == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.endswith("UsageError: rank 5 in a group of 2: expected 0 to 1")


def same_rank() -> str:
    """Two processes claim rank 0; rank 1 joins too."""
    place = int(os.environ["RANK"])
    try:
        init(min(place, 1) if place < 2 else 0, 2, seconds=2)
    except UsageError as error:
        return str(error)
    return "joined"


def test_two_processes_of_one_rank(ranks: RankServer) -> None:
    """One process gets an error that names the other, whose group is formed."""
    run = ranks.start(3, same_rank, timeout=None)
    ended = run.join()
    answers = [rank.value for rank in ended]
    assert answers.count("joined") == 2, answers
    (loser,) = [place for place in (0, 2) if answers[place] != "joined"]
    winner = ended[2 - loser].pid
    assert f"rank 0 of 2 is already taken by pid {winner} on " in answers[loser]
    assert "a rank of its own" in answers[loser]


def too_few_ranks(world_size: int) -> float:
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        init(int(os.environ["RANK"]), world_size, seconds=0.7)
    waited = time.monotonic() - start
    text = str(caught.value)
    assert "ranks 2, 3 did not arrive within 0.7 s of this rank's arrival" in text
    assert "; rank 2 has not arrived yet; rank 3 has not arrived yet: are" in text, text
    assert "same world size" in str(caught.value)
    assert not dist.is_initialized()
    return waited


def test_too_few_ranks(ranks: RankServer) -> None:
    for waited in ranks.run(2, too_few_ranks, 4, timeout=None):
        assert waited >= 0.7


def rank_0_is_missing() -> None:
    with pytest.raises(CollectiveTimeout, match=r"rank 0 did not arrive within 0\.5 s"):
        init(1, 2, seconds=0.5)


def test_missing_rank_0(ranks: RankServer) -> None:
    ranks.run(1, rank_0_is_missing, timeout=None)


def different_world_sizes() -> str:
    rank = int(os.environ["RANK"])
    try:
        init(rank, 2 + rank, seconds=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "joined"


def test_different_world_sizes(ranks: RankServer) -> None:
    """Both processes fail in time, with advice."""
    for message in ranks.run(2, different_world_sizes, timeout=None):
        assert message.startswith("PhalanxError: ")
        assert "rank 0 was started with world size 2, this rank with 3" in message, message


def dies_before_it_joins() -> str:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveTimeout, match="rank 1 did not arrive"):
        init(0, 2, seconds=0.5)
    return "told"


def test_a_rank_that_dies_before_it_joins(ranks: RankServer) -> None:
    first, second = ranks.start(2, dies_before_it_joins, timeout=None).join()
    assert (first.value, second.code) == ("told", -9)


def stops_while_joining(name: str) -> str:
    """Rank 1 claims its rank, and stops."""
    if os.environ["RANK"] == "1":
        module: Any = importlib.import_module("phalanx.topology.group_formation")
        module._open_segment = lambda *_: os.kill(os.getpid(), getattr(signal, name))
    with pytest.raises(CollectiveTimeout, match="rank 1 did not arrive") as caught:
        init(int(os.environ["RANK"]), 2, seconds=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("number", "words"),
    [("SIGSTOP", "arrived, and is stopped by a signal"), ("SIGKILL", "arrived, and has ended")],
)
def test_rank_that_stops_while_joining(ranks: RankServer, number: str, words: str) -> None:
    run = ranks.start(2, stops_while_joining, number, timeout=None)
    assert not run.wait(60, [0])
    first, second = run.collect()
    assert f"; rank 1 (pid {second.pid} on {socket.gethostname()}) {words}: are" in first.value


def some_skip_new_group() -> str:
    dist.barrier()
    rank = dist.get_rank()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:  # not in an operation
        while not Path(os.environ["FOLDER"], "told").exists():
            time.sleep(0.001)
        return ""
    with pytest.raises(CollectiveTimeout) as caught:
        dist.new_group([0, 2, 1], timeout=timedelta(seconds=1))
    Path(os.environ["FOLDER"], "told").touch()
    return str(caught.value)


def test_activity_of_ranks_missing_from_a_new_group(ranks: RankServer) -> None:
    first, second, third = ranks.start(3, some_skip_new_group).join()
    text = first.value
    assert "joining the group: ranks 1, 2 did not arrive within 1 s of" in text
    at = r"since barrier #1 at test_joining\.py:\d+, \d\.\d s ago"
    assert re.search(rf"; rank [12] \(pid {third.pid}\) is in its own code {at}[;:]", text), text
    assert re.search(rf"; rank [12] \(pid {second.pid}\) was killed by SIGKILL[;:]", text), text


def not_all_call_new_group() -> str:
    """Rank 2 does not call `new_group` for a group that it is not in."""
    rank, formed = dist.get_rank(), Path(os.environ["FOLDER"], "formed")
    if rank == 2:
        wait_for(formed.exists)
        with pytest.raises(UsageError) as refused:
            dist.new_group([0, 2])
        return str(refused.value)
    dist.barrier(dist.new_group([0, 1]))
    formed.touch()
    if rank == 1:
        return ""
    with pytest.raises(CollectiveTimeout) as caught:
        dist.new_group([0, 2], timeout=timedelta(seconds=0.5))
    return str(caught.value)


def test_not_all_call_new_group(ranks: RankServer) -> None:
    first, _, third = ranks.run(3, not_all_call_new_group)
    assert re.fullmatch(
        r"new_group: rank 2 called it for the ranks \[0, 2\] when rank 0 \(pid \d+ on .*\) called "
        r"it for the ranks \[0, 1\]\. For \[0, 1\] ranks 0, 1 called it so far, rank 2 did not\. "
        r"All ranks of the job must call new_group, in the same order, even those .*",
        third,
    ), third
    assert (
        ": new_group for the ranks [0, 2] of the job was called by [0], but not by [2]. All ranks"
        in first
    ), first


def no_store(url: str) -> None:
    with pytest.raises(dist.DistError):
        init(1, 2, url=url, seconds=1)


def test_no_store_at_the_address(ranks: RankServer) -> None:
    port = find_free_port()
    ranks.run(1, no_store, f"tcp://127.0.0.1:{port}", timeout=None)


def port_in_use(url: str) -> None:
    with pytest.raises(dist.DistNetworkError, match=r"EADDRINUSE|in use"):
        init(0, 1, url=url, seconds=2)


def test_port_in_use(ranks: RankServer) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        ranks.run(1, port_in_use, f"tcp://127.0.0.1:{port}", timeout=None)


def joins_at_a_port_in_use(port: int) -> str:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    launcher_store._REPORT_SECONDS = 0.1
    with pytest.raises(UsageError) as caught:
        phalanx.init(device="cpu")
    return str(caught.value)


def test_every_rank_reports_a_port_in_use(ranks: RankServer) -> None:
    """Rank 0 raises; rank 1 is connected to a program that never answers, and logs that."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = ranks.start(2, joins_at_a_port_in_use, port, timeout=None)
        stderr = Path(run.folder, "stderr-1")
        wait_for(lambda: stderr.exists() and "Check that all ranks" in stderr.read_text())
        run.wait(60, [0])
        first, second = run.collect()
    assert f"rank 0 can't listen on port {port}, the port of the rendezvous: it is" in first.value
    assert (
        f"rank 1 has waited 0.1 s for the rendezvous of the ranks at 127.0.0.1:{port}: a program"
        in (second.stderr)
    )


def no_rank() -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        dist.init_process_group("phalanx")


def test_environment_without_a_rank(ranks: RankServer) -> None:
    ranks.run(1, no_rank, timeout=None)


def interrupted_while_joining() -> None:
    """Ctrl-C ends the wait for missing ranks."""
    once_blocked(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        init(0, 2, seconds=100)


def test_ctrl_c_while_joining(ranks: RankServer) -> None:
    ranks.run(1, interrupted_while_joining, timeout=None)


def tries_again() -> None:
    """After a failure, the same process forms a group at another address."""
    with pytest.raises(CollectiveTimeout):
        init(0, 2, seconds=0.2)
    init(0, 1, url=f"file://{os.environ['FOLDER']}/other")
    dist.barrier()
    dist.destroy_process_group()


def test_second_attempt_of_a_process(ranks: RankServer) -> None:
    ranks.run(1, tries_again, timeout=None)
