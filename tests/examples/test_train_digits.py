"""The main example, compared with one process that trains on whole global batches."""

import gzip
import json
import os
import re
import runpy
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TIMEOUT = 110.0
# There are 1437 training digits: 11 global batches of 128, and one of 29 that no world size
# divides.
STEPS_PER_EPOCH = 12


@dataclass
class Run:
    returncode: int
    stdout: str
    stderr: str
    losses: list[float]
    accuracy: float


def start(command: list[str], cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )


@pytest.fixture(scope="module")
def script(repository: Path) -> Path:
    return repository / "examples" / "train_digits.py"


@pytest.fixture(autouse=True)
def search_path(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the script find its neighbours even if `runpy` runs it."""
    monkeypatch.syspath_prepend(str(script.parent))


def train(script: Path, folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> Run:
    losses = folder / "losses.json"
    command = [*(launcher or [sys.executable]), str(script), *options, "--losses", str(losses)]
    result = start(command, folder)
    assert result.returncode == 0, result.stderr
    written = json.loads(losses.read_text())
    return Run(
        result.returncode, result.stdout, result.stderr, written["losses"], written["accuracy"]
    )


def reference_losses(script: Path, steps: int, seed: int) -> list[float]:
    """Train in this process, in float64, on whole global batches."""
    example: dict[str, Any] = runpy.run_path(str(script))
    digits, _ = example["load_digits"](None, seed)
    images, labels = digits[list(range(len(digits)))]
    torch.manual_seed(seed)
    model = example["ConvNet"](0.0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-3)
    batches: list[Tensor] = []
    for epoch in range(2):
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed + epoch))
        batches += order.split(128)
    losses = []
    for batch in batches[:steps]:
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(model(images[batch].double()), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT)
def test_world_sizes_agree_with_one_process(script: Path, tmp_path: Path) -> None:
    expected = reference_losses(script, 20, seed=5)
    # In float32 a rounded tie of max pooling may change the losses, depending on the processor.
    options = ["--no-dropout", "--double", "--seed", "5"]
    for world_size, epochs in ((2, 2), (4, 1)):
        run_options = ["--epochs", str(epochs), "--nproc-per-node", str(world_size)]
        run = train(script, tmp_path, *options, *run_options)
        assert len(run.losses) == epochs * STEPS_PER_EPOCH
        reference = expected[: len(run.losses)]
        assert run.losses[: len(reference)] == pytest.approx(reference, rel=1e-6), (
            f"size {world_size}"
        )
    # Two hosts with two ranks each, connected by Gloo. tests/hosts covers MPI and the relay.
    phalanx_run = str(Path(sys.executable).with_name("phalanx")), "run", "--nproc-per-node", "4"
    options += ["--epochs", "1"]
    run = train(script, tmp_path, *options, launcher=(*phalanx_run, "--simulate-hosts", "2"))
    assert run.losses == pytest.approx(expected[:STEPS_PER_EPOCH], rel=1e-6)


@pytest.mark.slow
def test_reaches_97_percent_and_is_reproducible(script: Path, tmp_path: Path) -> None:
    full = train(script, tmp_path)
    assert full.accuracy >= 0.97
    assert f"accuracy on held-out digits: {full.accuracy:.2%}" in full.stdout
    assert re.search(r"2 ranks on phalanx: trained for \d+\.\d s, \d+\.\d% of it", full.stdout)
    assert re.search(r"epoch  1  loss of each rank  2\.\d{4}  2\.\d{4}\n", full.stderr)
    assert "100%" not in full.stderr  # no progress bar in a pipe
    short = train(script, tmp_path, "--epochs", "2")
    assert short.losses == full.losses[: 2 * STEPS_PER_EPOCH]


@pytest.mark.slow
def test_gloo_torchrun_and_per_parameter_give_the_same(script: Path, tmp_path: Path) -> None:
    """The losses do not depend on the backend, the launcher or the averaging function."""
    options = ["--no-dropout", "--epochs", "1"]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    bucketed = train(script, tmp_path, *options, launcher=(*torchrun, "--nproc-per-node=2"))
    assert "2 ranks on phalanx" in bucketed.stdout
    separate = train(script, tmp_path, *options, "--per-parameter", "--backend", "gloo")
    assert "2 ranks on gloo" in separate.stdout
    assert separate.losses == pytest.approx(bucketed.losses, rel=1e-5)


@pytest.fixture
def mnist(tmp_path: Path, shared_data: Path | None, script: Path) -> Path:
    """Return the folder of the real test images, or of scans in the same format."""
    if shared_data is not None:
        return shared_data / "mnist"
    images, labels = runpy.run_path(str(script))["load_scans"]()
    pixels = (images * 255).round().to(torch.uint8).numpy().tobytes()
    files = {
        "t10k-images-idx3-ubyte.gz": struct.pack(">4I", 0x803, len(labels), 28, 28) + pixels,
        "t10k-labels-idx1-ubyte.gz": struct.pack(">2I", 0x801, len(labels)) + bytes(labels),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(gzip.compress(content))
    return tmp_path


@pytest.mark.slow
def test_reads_mnist(script: Path, tmp_path: Path, mnist: Path) -> None:
    run = train(script, tmp_path, "--data", str(mnist), "--epochs", "2")
    # The loss decreases only if images and labels match; guessing gives 2.3.
    assert run.losses[-1] < 0.8 * run.losses[0]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere"], "nowhere: no MNIST files found, expected train-images-idx3-ubyte"),
        (["--global-batch", "1"], "global batch 1 given for world size 2, expected at least one"),
    ],
)
def test_invalid_input(script: Path, tmp_path: Path, options: list[str], message: str) -> None:
    result = start([sys.executable, str(script), *options], tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(f"train_digits: {message}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "options", [["--epochs", "0"], ["--nproc-per-node", "x"], ["--backend", "tcp"]]
)
def test_invalid_options(
    script: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(script), run_name="__main__")
    assert raised.value.code == 2
    output = capsys.readouterr().err
    assert f"argument {options[0]}: " in output
    assert repr(options[1]) in output
