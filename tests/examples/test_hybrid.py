"""The example with a parameter server, as a user runs it: undisturbed, killed, on two hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.networks import Network

pytestmark = pytest.mark.slow

TIMEOUT = 100.0
PHALANX_RUN = [sys.executable, "-c", "from phalanx.cli import main; main()", "run"]


def command(ranks: int, *options: str) -> list[str]:
    return [*PHALANX_RUN, "--nproc-per-node", str(ranks), *options]


def losses(output: str) -> dict[int, str]:
    return {int(epoch): loss for epoch, loss in re.findall(r"epoch +(\d+): loss (\S+)", output)}


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, out + err
    return out + err


def start(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*arguments], stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.fixture(scope="module")
def script(repository: Path) -> str:
    return str(repository / "examples/hybrid.py")


@pytest.fixture(scope="module")
def undisturbed(script: str) -> dict[int, str]:
    with start(*command(4), script, "--epochs", "6") as process:
        found = finished(process)
    assert "2 trainers, 1 servers; the least loss is 0.4264" in found
    return losses(found)


def test_loss_decreases(undisturbed: dict[int, str]) -> None:
    assert list(undisturbed) == list(range(6))
    # Guessing gives 0.69; six epochs of 25,600 samples approach the minimum.
    assert float(undisturbed[0]) < 0.65
    assert 0.42 < float(undisturbed[5]) < 0.51


def kill_after(
    checkpoint: Path, process: subprocess.Popen[str], script: str, rank: str
) -> psutil.Process:
    deadline = time.monotonic() + TIMEOUT
    while not checkpoint.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (found,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if script in child.cmdline() and child.environ().get("RANK") == rank
    ]
    found.kill()
    return found


@pytest.mark.usefixtures("no_copies")
def test_death_repeats_at_most_one_epoch(
    script: str, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    arguments = [script, "--epochs", "6", "--checkpoints", str(tmp_path)]
    with start(*command(4, "--max-restarts", "2"), *arguments) as process:
        server = kill_after(tmp_path / "epoch-001", process, script, "3")
        trainer = kill_after(tmp_path / "epoch-003", process, script, "1")
        output = finished(process)
    assert f"rank 3 (pid {server.pid}) was killed by SIGKILL" in output
    assert f"rank 1 (pid {trainer.pid}) was killed by SIGKILL" in output
    assert losses(output) == undisturbed


@pytest.fixture
def network() -> Iterator[Network]:
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        reason = f"needs root, iproute2 and util-linux (missing: {missing}, user {os.geteuid()})"
        # CI has them, and must not skip the test.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    with Network(2) as made:
        yield made


def test_two_hosts(script: str, undisturbed: dict[int, str], network: Network) -> None:
    """Trainers are on one host, and master and server on the other; rows are fetched by calls."""
    launchers = [
        start(
            *("ip", "netns", "exec", network.names[host]),
            *command(2, "--nnodes", "2", "--node-rank", str(host)),
            *("--rdzv-endpoint", f"{network.addresses[0]}:29651", script, "--epochs", "2"),
        )
        for host in range(2)
    ]
    try:
        _, found = map(finished, launchers)
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()
    assert losses(found) == {epoch: undisturbed[epoch] for epoch in range(2)}


def test_too_few_ranks(script: str) -> None:
    with start(*command(1), script) as process:
        _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    assert "4 ranks are needed: start with --nproc-per-node 4" in err
