"""The examples that use the Trainer, started, killed, stopped and started again as a user does."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from sklearn import datasets

TIMEOUT = 100.0
PHALANX_RUN = [sys.executable, "-c", "from phalanx.cli import main; main()", "run"]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # Tests run side by side: a process alone would take all cores.
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Poll until something holds; fail if the process ends before, or after too long."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    found = (re.search(r"step-(\d+)$", path.name) for path in folder.glob("*-step-*"))
    return [int(match[1]) for match in found if match]


def ranks(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The processes of the launcher's ranks."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "train_gpt.py" in " ".join(child.cmdline()) and "RANK" in child.environ():
                found[int(child.environ()["RANK"])] = child
        except psutil.Error:  # it is just starting or ending
            continue
    return found


@pytest.mark.timeout(200)
def test_gpt_is_killed_stopped_and_ends_the_same(
    repository: Path, tmp_path: Path, shared_data: Path | None
) -> None:
    """A rank gets SIGKILL, later the launcher SIGTERM; started again it ends as undisturbed."""
    script = [str(repository / "examples" / "train_gpt.py"), "--parallel", "ddp"]
    size = "--width 32 --depth 1 --length 16 --lr 0.01 --global-batch 16 --steps 150"
    text = [] if shared_data is None else ["--text", str(shared_data / "shakespeare/input.txt")]
    launcher = [*PHALANX_RUN, "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [*launcher, *script, *size.split(), *text, "--checkpoint-every", "10"]
    checkpoints = tmp_path / "checkpoints"
    disturbed = [*command, "--checkpoints", str(checkpoints)]
    with started(disturbed, tmp_path) as process:
        wait_until(lambda: steps(checkpoints), process)
        ranks(process)[1].send_signal(signal.SIGKILL)
        before = max(steps(checkpoints))
        wait_until(lambda: max(steps(checkpoints), default=0) > before, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 128 + signal.SIGTERM
    assert re.search(r"\[rank 0\] going on from step \d+ \(epoch 1, \d+ of its ", err)
    stopped = re.search(r"\[rank 0\] stopped by SIGTERM after step (\d+): saved, and leaving", err)
    assert stopped, err
    assert max(steps(checkpoints)) == int(stopped[1]) < 150
    last = run(disturbed, tmp_path)
    assert last.returncode == 0, last.stderr
    assert f"[rank 0] going on from step {stopped[1]} (epoch 1" in last.stderr
    whole = run(command, tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert last.stdout == whole.stdout
    loss = re.search(r"loss on held-out text: (\d\.\d{4}) nats a letter", whole.stdout)
    # Without a look at the letters before, of sums 2.4 are left, of English 3.3.
    assert loss
    assert float(loss[1]) < (2.0 if shared_data is None else 3.0)


def write_mnist(folder: Path, count: int) -> None:
    """A file of digits as MNIST's: scans of scikit-learn, in a margin."""
    scans = datasets.load_digits()
    pixels = np.zeros((count, 28, 28), np.uint8)
    pixels[:, 6:22, 6:22] = np.kron(scans.images[:count], np.ones((2, 2))) * 15
    labels = bytes(scans.target[:count].tolist())
    files = {
        "train-images-idx3-ubyte": struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes(),
        "train-labels-idx1-ubyte": struct.pack(">2I", 0x801, count) + labels,
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_mnist_goes_on_at_another_world_size(repository: Path, tmp_path: Path) -> None:
    """Two ranks for an epoch, one for the next."""
    write_mnist(tmp_path, 300)
    script = str(repository / "examples" / "train_mnist.py")
    options = ["--data", ".", "--checkpoints", "checkpoints", "--epochs"]
    first = run([*PHALANX_RUN, "--nproc-per-node", "2", script, *options, "1"], tmp_path)
    assert first.returncode == 0, first.stderr
    assert "[rank 0] accuracy on held-out digits: " in first.stdout
    second = run([sys.executable, script, *options, "3"], tmp_path)
    assert second.returncode == 0, second.stderr
    assert re.search(r"going on from step 4 \(epoch 2, 0 of its 240 samples .*", second.stderr)
    assert "; ranks 2 then, 1 now" in second.stderr
    accuracy = re.search(r"accuracy on held-out digits: (\d+\.\d+)%", second.stdout)
    assert accuracy
    assert float(accuracy[1]) > 30  # guessing gives 10
