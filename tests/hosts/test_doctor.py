"""The doctor between hosts: namespaces, one of them behind a slow link, two without a route."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import mpi, ssh_hosts
from tests.networks import Network

pytestmark = pytest.mark.slow

MISSING = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
REASON = f"needs root, iproute2 and util-linux (missing: {MISSING}, user {os.geteuid()})"
LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
# All links are limited, since a busy machine would make any of them slow at times.
RATE = 50e6 / 8
"""Bytes per second of the slow link."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three hosts: host 2 is behind a slow link, and packets from 1 to 2 are dropped."""
    if MISSING or os.geteuid() != 0:
        # CI has these programs, so the tests must not be skipped there.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    with Network(3, "300mbit") as namespaces:
        namespaces.shape(2, "50mbit")
        namespaces.block(1, 2)
        yield namespaces


def check(found: dict[str, Any], names: list[str]) -> None:
    """Check the findings and measurements."""
    assert found["fit"] is False
    assert [host["name"] for host in found["network"]["hosts"]] == names
    links = {
        (link["source"], link["target"]): link
        for link in found["network"]["links"]
        if link["via"] == "network"
    }
    assert len(links) == 6  # three hosts are present
    for way in ((1, 2), (2, 1)):
        assert links[way]["error"]
        assert links[way]["bandwidth"] is None
    for way in ((0, 2), (2, 0)):
        assert 0.6 * RATE < links[way]["bandwidth"] < 1.05 * RATE
        assert links[way]["slow"]
    for way in ((0, 1), (1, 0)):
        assert links[way]["bandwidth"] > 2 * RATE
        assert not links[way]["slow"]
        assert 0 < links[way]["latency"] < 0.1
    blocked = [each["values"] for each in found["findings"] if each["name"] == "blocked"]
    assert {(each["from"], each["to"]) for each in blocked} == {
        (names[1], names[2]),
        (names[2], names[1]),
    }
    assert {each["level"] for each in found["findings"] if each["name"] == "outlier"} == {"note"}


def test_the_ranks_of_a_job(network: Network, tmp_path: Path) -> None:
    """Three hosts with two ranks each, started like a job."""
    processes, outputs = [], [tmp_path / f"output-{host}" for host in range(3)]
    for host, path in enumerate(outputs):
        options = ["--nnodes", "3", "--node-rank", str(host), "--nproc-per-node", "2"]
        options += ["--master-addr", network.addresses[0], "--master-port", "29514"]
        doctor = ["-m", "phalanx", "doctor", "--output", str(tmp_path / "found.json")]
        environment = {"PHALANX_JOBS_DIR": str(tmp_path / f"jobs-{host}")}
        with path.open("w") as file:
            command = [PHALANX, "run", *options, *doctor]
            processes.append(network.start(host, command, environment, file))
    try:
        codes = [process.wait(LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    text = outputs[0].read_text()
    print(text, outputs[1].read_text(), outputs[2].read_text())
    assert codes[0] == 1, text
    found = json.loads((tmp_path / "found.json").read_text())
    check(found, network.names)
    memory = [link for link in found["network"]["links"] if link["via"] == "memory"]
    assert {(link["source"], *link["ranks"]) for link in memory} == {
        (host, *pair)
        for host in range(3)
        for pair in ((2 * host, 2 * host + 1), (2 * host + 1, 2 * host))
    }
    assert all(link["bandwidth"] > 0 and link["latency"] > 0 for link in memory)
    assert f"{network.names[1]} can't reach {network.names[2]}: " in text
    assert "blocked" in text
    assert "not fit: " in text


@pytest.mark.parametrize("library", mpi.LIBRARIES)
def test_ranks_of_mpirun(library: str, tmp_path: Path) -> None:
    """MPI sets their ranks, and the store of rank 0 outlives the answers of the others."""
    path = tmp_path / "found.json"
    completed = mpi.run(library, 3, [PHALANX, "doctor", "--output", str(path)])
    assert completed.returncode == 0, completed.stdout + completed.stderr
    network = json.loads(path.read_text())["network"]
    assert [host["ranks"] for host in network["hosts"]] == [[0, 1, 2]]
    assert len(network["links"]) == 6
    assert all(link["bandwidth"] > 0 for link in network["links"])


def test_peers_over_ssh(tmp_path: Path) -> None:
    """Two reachable peers, and three that ssh can't log in to, each for another reason."""
    if MISSING or ssh_hosts.MISSING or os.geteuid() != 0:
        reason = f"{REASON}, and OpenSSH ({ssh_hosts.MISSING})"
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    path = tmp_path / "found.json"
    with (
        Network(3, "300mbit") as network,
        ssh_hosts.SshHosts(network, tmp_path, 2, hidden) as hosts,
    ):
        network.shape(1, "50mbit")
        network.block(0, 1)
        absent = ["node-locked", "node-stranger", "node-closed"]
        command = [PHALANX, "doctor", "--ssh", hosts.ssh, "--output", str(path), "--peers"]
        command.append(",".join(["node-0", "node-1", *absent]))
        completed = subprocess.run(
            ["ip", "netns", "exec", network.names[2], *command],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "PHALANX_JOBS_DIR": str(tmp_path / "jobs")},
        )
        assert hosts.processes("--answer") == []
    assert completed.returncode == 1, completed.stdout + completed.stderr
    found = json.loads(path.read_text())
    check(found, ["here", "node-0", "node-1", *absent])
    messages = [each["message"] for each in found["findings"] if each["name"] == "absent"]
    assert [each.partition(" (ssh: ")[0] for each in messages] == [
        "node-locked: ssh needs a password, or its key is not accepted",
        "node-stranger: the host key is unknown to ssh, or it has changed",
        "node-closed: no ssh server is listening there",
    ]


PROBE = """
import sys
from phalanx.doctor.peers.probes import ProbeServer, UnreachableError, measure
address, port = sys.argv[1:3]
if port == "answer":
    server = ProbeServer(address, b"t" * 32)
    print(server.port, flush=True)
    sys.stdin.read()
else:
    try:
        print(measure(address, int(port), b"t" * 32))
    except UnreachableError as error:
        print(error)
"""


def test_a_network_that_drops_large_packets() -> None:
    """As in a tunnel with a smaller MTU than that of the interfaces, without notification."""
    if MISSING or os.geteuid() != 0:
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    with Network(2) as network:
        # A token bucket never lets through a packet that is larger than itself.
        network.shape(0, "100mbit", burst="1000b")
        command = [sys.executable, "-c", PROBE, network.addresses[1]]
        inside = [["ip", "netns", "exec", name, *command] for name in network.names]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([*inside[1], "answer"], **pipes) as server:
            port = server.stdout.readline().strip()
            completed = subprocess.run(
                [*inside[0], port], capture_output=True, text=True, timeout=LIMIT
            )
            server.communicate(timeout=LIMIT)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("small packets pass, but large packets do not: "), (
        completed.stdout
    )
