"""Groups that the same processes destroy and form again in one store, as under a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import rpc, topology
from phalanx.errors import CollectiveTimeout
from phalanx.launcher.store import HOST, host_store, join_store
from tests.ranks import RankServer
from tests.waiting import wait_for

LIMIT = 60
COMMANDS = {
    "phalanx run": ["-c", "from phalanx.cli import main; main()", "run"],
    "torchrun": ["-m", "torch.distributed.run"],
}
SCRIPT = """
import torch
import torch.distributed as dist
import phalanx

for turn in range(4):
    if turn % 2:
        phalanx.init(device="cpu")
    else:
        dist.init_process_group("phalanx")
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    dist.destroy_process_group()
"""


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that outlives the groups, as a launcher's does."""
    store = host_store()
    yield store.port
    del store


def point_to(port: int) -> None:
    """Set the environment as a launcher that hosts the store does."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", COMMANDS)
def test_under_a_launcher(command: str, tmp_path: Path, jobs: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, *COMMANDS[command], "--nproc-per-node", "2", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert list(jobs.iterdir()) == []


def form_repeatedly(port: int) -> None:
    """Leave a group and form it again, as fast as each rank can, with subgroups and workers."""
    point_to(port)
    for turn in range(4):
        if turn % 2:
            phalanx.init(device="cpu", timeout=20)
        else:
            dist.init_process_group("phalanx", timeout=timedelta(seconds=20))
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.full((turn + 1,), float(rank))
        for _ in range(2):
            # Its name is derived from its ranks, so it has the same keys each time.
            group = dist.new_group(list(range(size)), use_local_synchronization=True)
            dist.all_reduce(tensor, group=group)
            dist.destroy_process_group(group)
        assert (tensor == size * sum(range(size))).all()
        pair = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            dist.broadcast(tensor, 0, group=pair)
        if turn % 2:
            rpc.init_rpc(f"worker{rank}")
            assert rpc.rpc_sync(f"worker{(rank + 1) % size}", os.getpid) > 0
            rpc.shutdown()
        dist.destroy_process_group()


@pytest.mark.parametrize("hosts", ("", "aab"), ids=("one host", "two hosts"))
def test_repeated_groups(ranks: RankServer, port: int, hosts: str) -> None:
    ranks.run(3, form_repeatedly, port, timeout=None, hosts=hosts)


def enter(port: int, seconds: float = 20) -> None:
    """Form a group of two ranks without PyTorch, which would count the groups that failed."""
    store = join_store(HOST, port, timedelta(seconds=20))
    rank = int(os.environ["RANK"])
    topology.join(store, rank, 2, timedelta(seconds=seconds))[-1].close()


def rank_1_gives_up(port: int) -> None:
    gave_up = Path(os.environ["FOLDER"], "gave up")
    if os.environ["RANK"] == "0":
        wait_for(gave_up.exists)
    else:
        with pytest.raises(CollectiveTimeout, match="rank 0 did not arrive"):
            enter(port, seconds=0.2)
        gave_up.touch()
    enter(port)


def rank_0_gives_up(port: int) -> None:
    gave_up, both = Path(os.environ["FOLDER"], "gave up"), Path(os.environ["FOLDER"], "both")
    if os.environ["RANK"] == "0":
        with pytest.raises(CollectiveTimeout, match="rank 1 did not arrive"):
            enter(port, seconds=0.2)
        gave_up.touch()
        wait_for(both.exists)
    else:
        wait_for(gave_up.exists)
        with pytest.raises(CollectiveTimeout, match="rank 0 did not arrive"):
            enter(port, seconds=0.2)  # the round that rank 0 has left
        both.touch()
    enter(port)


@pytest.mark.parametrize("how", (rank_0_gives_up, rank_1_gives_up))
def test_after_a_group_that_was_not_formed(
    ranks: RankServer, port: int, how: Callable[[int], None]
) -> None:
    ranks.run(2, how, port, timeout=None)
