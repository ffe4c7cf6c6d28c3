"""The documented loop on two ranks, of which one is killed: it is the uninterrupted run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.documented_loop import STEPS_PER_EPOCH, read_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Launch = Callable[..., "subprocess.Popen[str]"]

KILL = """
            if step == {step} and session.rank == 1 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
    torch.save([loss, model.state_dict()], f"{name}-{{session.rank}}.pt")
"""


def run(launch: Launch, folder: Path, name: str, every: int, kill_at: int) -> Any:
    """Run the program; return the last loss and the parameters of each rank."""
    program = "import os, signal\n" + read_program(epochs=3, every=every)
    program += KILL.format(step=kill_at, name=name)
    (folder / "train.py").write_text(program.replace('"checkpoints"', f'"{name}"'))
    process = launch("--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert (folder / "killed").exists() == bool(kill_at)
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("every", "kill_at"), [(3, 7), (STEPS_PER_EPOCH, STEPS_PER_EPOCH + 2)])
def test_a_killed_rank(launch: Launch, tmp_path: Path, every: int, kill_at: int) -> None:
    whole = run(launch, tmp_path, "whole", every, 0)
    resumed = run(launch, tmp_path, "resumed", every, kill_at)
    for (loss, parameters), (other_loss, others) in zip(whole, resumed, strict=True):
        assert loss.equal(other_loss)
        assert all(parameters[name].equal(others[name]) for name in parameters)
    assert not whole[0][0].equal(whole[1][0]), "each rank has samples of its own"
