"""Saves that are killed, at every system call and while other ranks wait."""

import itertools
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.checkpoints import files
from phalanx.errors import PeerLost
from phalanx.train import Checkpointer
from tests.ranks import RankServer
from tests.system_calls import run_until

KEEP = 2


def numbered(step: int) -> dict[str, Any]:
    # More than `files.SMALL`, so that the hashing thread is used.
    return {"step": step, "weight": torch.full((100_000,), float(step)), "bias": torch.arange(step)}


def check(checkpoint: Any) -> int:
    assert checkpoint is not None
    step: int = checkpoint.step
    expected = numbered(step)
    assert checkpoint.state["step"] == step
    assert torch.equal(checkpoint.state["weight"], expected["weight"])
    assert torch.equal(checkpoint.state["bias"], expected["bias"])
    return step


def list_names(folder: str) -> list[str]:
    return sorted(os.listdir(folder))


def kill_at_every_call(first: int, stride: int) -> dict[str, int]:
    """Kill saves at the calls `first`, `first + stride`, and so on.

    Return how many saves were killed, how many of these had committed the checkpoint, and how many
    left temporary files.
    """
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    counts = {"killed": 0, "committed": 0, "leftovers": 0}
    try:
        for step in range(KEEP):
            Checkpointer(folder, keep=KEEP).save(step, numbered(step))
        for call in itertools.count(first, stride):
            step += 1
            checkpoints, state = Checkpointer(folder, keep=KEEP), numbered(step)

            def save(step: int = step, checkpoints: Any = checkpoints, state: Any = state) -> None:
                checkpoints.save(step, state)
                checkpoints._directory.wait_for_removals()

            killed = run_until(call, save)
            counts["leftovers"] += any(name.startswith(".") for name in list_names(folder))
            found = check(checkpoints.load())
            assert found in ((step - 1, step) if killed else (step,))
            if not killed:
                return counts
            counts["killed"] += 1
            counts["committed"] += found == step
            step += 1
            checkpoints.save(step, numbered(step))
            checkpoints._directory.wait_for_removals()
            assert check(checkpoints.load()) == step
            names = list_names(folder)
            assert len(names) == KEEP
            assert all(re.fullmatch(r"\d{6}-step-\d+", name) for name in names)
        pytest.fail("the saves never end")
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_at_every_system_call(ranks: RankServer) -> None:
    """The previous or the new checkpoint is usable, and the next save removes all leftovers."""
    tracers = 2  # the number of cores in CI
    jobs = [
        ranks.start(1, kill_at_every_call, 1 + first, tracers, timeout=None)
        for first in range(tracers)
    ]
    halves = [job.join(limit=240)[0].value for job in jobs]
    counts = {key: sum(half[key] for half in halves) for key in halves[0]}
    assert counts["killed"] > 50
    # Both happen: before the rename and after it.
    assert 0 < counts["committed"] < counts["killed"]
    assert counts["leftovers"] > 10


def die_while_writing(victim: int, sharded: bool) -> tuple[str, list[str]]:
    folder = os.environ["FOLDER"] + "/checkpoints"
    checkpoints = Checkpointer(folder, sharded=sharded)
    checkpoints.save(1, numbered(1))
    if dist.get_rank() == victim:
        files._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with pytest.raises(PeerLost) as raised:
        checkpoints.save(2, numbered(2))
    return str(raised.value), [name for name in list_names(folder) if name.startswith(".")]


@pytest.mark.parametrize(("victim", "sharded"), [(0, False), (0, True), (1, True)])
def test_rank_dies_while_writing(victim: int, sharded: bool, ranks: RankServer) -> None:
    run = ranks.start(3, die_while_writing, victim, sharded)
    ended = run.join()
    folder = Path(run.folder) / "checkpoints"
    for rank in ended:
        if rank.rank != victim:
            message, leftovers = rank.value
            assert re.search(rf"rank {victim}\b", message)
            if victim != 0 and rank.rank == 0:
                assert leftovers == []
    checkpoints = Checkpointer(folder)
    assert check(checkpoints.load()) == 1
    checkpoints.save(2, numbered(2))
    assert list_names(str(folder)) == ["000001-step-1", "000002-step-2"]
