"""Two hosts behind separate NATs, with the same private address and one open port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import key
from tests.nats import NatNetwork

pytestmark = pytest.mark.slow

PORT = 29540
LIMIT = 200
PHALANX = str(Path(sys.executable).with_name("phalanx"))
MISSING = [program for program in ("ip", "nft", "unshare") if shutil.which(program) is None]
CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=5).close()
        print("reached")
    except OSError as error:
        print(error)
"""
LISTEN = """
import socket, sys, time
listeners = [socket.create_server(("0.0.0.0", int(port))) for port in sys.argv[1:]]
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def nats() -> Iterator[NatNetwork]:
    if MISSING or os.geteuid() != 0:
        reason = f"needs root, iproute2, nftables, util-linux (missing: {MISSING})"
        # CI has them and must run these tests.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    with NatNetwork(2, PORT) as nats:
        yield nats


def run_on_both(nats: NatNetwork, folder: Path, *script: str) -> str:
    """Run a script on both hosts, two ranks each, over the relay; return the output of both."""
    key.create_file(str(folder / "key"))
    root = Path(__file__).parents[2]
    outputs, processes = [folder / "host-0", folder / "host-1"], []
    for host, output in enumerate(outputs):
        options = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "2"]
        options += ["--master-addr", nats.addresses[0], "--master-port", str(PORT)]
        command = [PHALANX, "run", *options, "--key-file", str(folder / "key"), *script]
        jobs = str(folder / f"jobs-{host}")
        environment = {
            "PHALANX_JOBS_DIR": jobs,
            "PHALANX_TRANSPORT": "relay",
            "PYTHONPATH": str(root),
        }
        with output.open("w") as file:
            processes.append(nats.start(host, command, environment, file))
    try:
        codes = [process.wait(LIMIT) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [None, None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    text = "".join(output.read_text() for output in outputs)
    assert codes == [0, 0], text
    return text


def reachable_ports(nats: NatNetwork, *ports: int) -> list[bool]:
    """Return which ports of host 0 can be reached from host 1 while host 0 listens on all."""
    numbers = [str(port) for port in ports]
    listening = nats.start(0, [sys.executable, "-c", LISTEN, *numbers], output=subprocess.PIPE)
    assert listening.stdout is not None
    assert listening.stdout.readline() == "ready\n"
    command = [sys.executable, "-c", CONNECT, nats.addresses[0], *numbers]
    connecting = nats.start(1, command, output=subprocess.PIPE)
    text = connecting.communicate(timeout=30)[0]
    listening.kill()
    listening.communicate()
    return [line == "reached" for line in text.splitlines()]


@pytest.mark.timeout(LIMIT + 40)
def test_the_conformance_suite(nats: NatNetwork, tmp_path: Path) -> None:
    assert reachable_ports(nats, PORT, PORT + 1) == [True, False]
    suite = Path(__file__).with_name("transport_suite.py")
    text = run_on_both(nats, tmp_path, str(suite), "relay")
    # Seven cases for a rank of each host, one for all four.
    assert text.count(" 2 passed") == 2 * 7, text
    assert text.count("all_pairs 4 passed") == 4, text


@pytest.mark.timeout(2 * LIMIT)
def test_the_example_trains(nats: NatNetwork, repository: Path, tmp_path: Path) -> None:
    """The losses equal those of one host."""
    script = str(repository / "examples" / "train_digits.py")
    options = ["--no-dropout", "--epochs", "1"]
    behind_nats, on_one_host = tmp_path / "apart.json", tmp_path / "together.json"
    text = run_on_both(nats, tmp_path, script, *options, "--losses", str(behind_nats))
    assert "4 ranks on phalanx" in text
    command = [PHALANX, "run", "--nproc-per-node", "2", script, *options]
    subprocess.run([*command, "--losses", str(on_one_host)], check=True, timeout=LIMIT)
    losses = [json.loads(path.read_text())["losses"] for path in (behind_nats, on_one_host)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
