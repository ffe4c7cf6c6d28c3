"""The pipeline, run as a user runs it, compared with one process that has the whole network."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import copies

STEPS, BATCH = 10, 24


@pytest.fixture(scope="module")
def script(repository: Path) -> Path:
    return repository / "examples/pipeline.py"


@pytest.fixture(scope="module")
def example(script: Path) -> dict[str, Any]:
    return runpy.run_path(str(script), run_name="example")


def train_alone(example: dict[str, Any]) -> dict[int, float]:
    network = nn.Sequential(*(example["new_stage"](number) for number in range(2)))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = {}
    for step in range(1, STEPS + 1):
        points, targets = example["batch"](step, BATCH)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(points), targets)
        loss.backward()
        optimizer.step()
        losses[step] = float(loss.detach())
    return losses


@pytest.mark.slow
def test_losses_equal_those_of_one_process(script: Path, example: dict[str, Any]) -> None:
    phalanx = [copies.PHALANX]
    options = ["--steps", str(STEPS), "--batch", str(BATCH)]
    result = subprocess.run(
        [*phalanx, "run", "--nproc-per-node", "4", str(script), *options],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    alone = train_alone(example)
    found = re.findall(r"^\[rank 1\] step (\d+): loss (\S+)$", result.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == [1, 2, 4, 6, 8, 10]
    for step, loss in found:
        assert float(loss) == pytest.approx(alone[int(step)], abs=2e-4)
    assert len(result.stdout.splitlines()) == len(found)  # one replica prints


@pytest.mark.parametrize("options", [("--batch", "12"), ("--steps", "0"), ("--batch", "0")])
def test_invalid_options(
    script: Path,
    options: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(script), run_name="__main__")
    assert " ".join(options) in capsys.readouterr().err
