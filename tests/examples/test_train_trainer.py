"""The examples with the Trainer: started, killed, stopped and restarted as a user does."""

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

from phalanx.data import load_digits
from tests import copies

pytestmark = pytest.mark.slow

TIMEOUT = 100.0
PHALANX_RUN = [copies.PHALANX, "run"]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # Tests run in parallel, so a process must not use all cores.
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
    """Poll until a condition holds; fail if the process ends before, or at the timeout."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps(folder: Path) -> list[int]:
    """Return the steps of the existing checkpoints."""
    found = (re.search(r"step-(\d+)$", path.name) for path in folder.glob("*-step-*"))
    return [int(match[1]) for match in found if match]


def ranks(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """Return the processes of the launcher's ranks."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "train_gpt.py" in " ".join(child.cmdline()) and "RANK" in child.environ():
                found[int(child.environ()["RANK"])] = child
        except psutil.Error:  # the process is starting or ending
            continue
    return found


@pytest.mark.usefixtures("no_copies")
@pytest.mark.timeout(200)
def test_interrupted_gpt_equals_uninterrupted(
    repository: Path, tmp_path: Path, shared_data: Path | None
) -> None:
    """Kill a rank, later stop the launcher; after a restart the result equals that of one run."""
    script = [str(repository / "examples" / "train_gpt.py"), "--parallel", "ddp"]
    size = "--width 32 --depth 1 --length 16 --lr 0.01 --global-batch 16 --steps 150"
    text = [] if shared_data is None else ["--text", str(shared_data / "shakespeare/input.txt")]
    launcher = [*PHALANX_RUN, "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [*launcher, *script, *size.split(), *text, "--checkpoint-every", "10"]
    checkpoints = tmp_path / "checkpoints"
    interrupted = [*command, "--checkpoints", str(checkpoints)]
    with started(interrupted, tmp_path) as process:
        wait_until(lambda: steps(checkpoints), process)
        ranks(process)[1].send_signal(signal.SIGKILL)
        previous = max(steps(checkpoints))
        wait_until(lambda: max(steps(checkpoints), default=0) > previous, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 128 + signal.SIGTERM
    assert re.search(r"\[rank 0\] resuming from step \d+ \(epoch 1, \d+ of its ", err)
    stopped = re.search(
        r"\[rank 0\] stopped by SIGTERM after step (\d+): checkpoint saved, exiting", err
    )
    assert stopped, err
    assert max(steps(checkpoints)) == int(stopped[1]) < 150
    resumed = run(interrupted, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"[rank 0] resuming from step {stopped[1]} (epoch 1" in resumed.stderr
    uninterrupted = run(command, tmp_path)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    assert resumed.stdout == uninterrupted.stdout
    loss = re.search(r"loss on held-out text: (\d\.\d{4}) nats a letter", uninterrupted.stdout)
    # Without context the loss would be 2.4 for sums, and 3.3 for English.
    assert loss
    assert float(loss[1]) < (2.0 if shared_data is None else 3.0)


def test_gpt_across_hosts(repository: Path, tmp_path: Path) -> None:
    """With DiLoCo, on two simulated hosts."""
    script = [str(repository / "examples" / "train_gpt.py"), "--across", "--every", "16"]
    size = "--width 32 --depth 1 --length 16 --lr 0.01 --global-batch 16 --steps 150"
    launcher = [*PHALANX_RUN, "--simulate-hosts", "2", "--nproc-per-node", "2"]
    ended = run([*launcher, *script, *size.split()], tmp_path)
    assert ended.returncode == 0, ended.stderr
    loss = re.search(r"loss on held-out text: (\d\.\d{4}) nats a letter", ended.stdout)
    assert loss
    assert float(loss[1]) < 2.0  # without context 2.4
    wrong = run([sys.executable, *script, "--parallel", "ddp"], tmp_path)
    assert wrong.returncode == 1
    assert wrong.stderr == "train_gpt: --across with --parallel ddp given, not plain\n"


def write_mnist(folder: Path, count: int) -> None:
    """Write the package's digits with a margin, in the format of MNIST."""
    scans, digits = load_digits()
    pixels = np.zeros((count, 28, 28), np.uint8)
    pixels[:, 6:22, 6:22] = np.kron(scans[:count], np.ones((2, 2))) * 240
    labels = bytes(digits[:count].tolist())
    files = {
        "train-images-idx3-ubyte": struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes(),
        "train-labels-idx1-ubyte": struct.pack(">2I", 0x801, count) + labels,
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_mnist_resumes_at_other_world_size(repository: Path, tmp_path: Path) -> None:
    """Train an epoch on two ranks, and the next ones on one rank."""
    write_mnist(tmp_path, 300)
    script = str(repository / "examples" / "train_mnist.py")
    options = ["--data", ".", "--checkpoints", "checkpoints", "--epochs"]
    first = run([*PHALANX_RUN, "--nproc-per-node", "2", script, *options, "1"], tmp_path)
    assert first.returncode == 0, first.stderr
    assert "[rank 0] accuracy on held-out digits: " in first.stdout
    second = run([sys.executable, script, *options, "3"], tmp_path)
    assert second.returncode == 0, second.stderr
    assert re.search(r"resuming from step 4 \(epoch 2, 0 of its 240 samples .*", second.stderr)
    assert "; ranks 2 before, 1 now" in second.stderr
    accuracy = re.search(r"accuracy on held-out digits: (\d+\.\d+)%", second.stdout)
    assert accuracy
    assert float(accuracy[1]) > 30  # guessing gives 10
