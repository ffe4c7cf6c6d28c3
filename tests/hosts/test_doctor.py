"""The doctor between hosts: namespaces, one of them behind a slow link, two that don't meet."""

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

MISSING = [what for what in ("ip", "tc", "unshare") if shutil.which(what) is None]
REASON = f"needs root, iproute2 and util-linux (missing: {MISSING}, user {os.geteuid()})"
LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
# Of one link; the others have one too, since by turns a busy machine makes any of them slow.
RATE = 50e6 / 8
"""Bytes per second of the slow link."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Host 2 is behind a slow link, and nothing gets from 1 to 2."""
    if MISSING or os.geteuid() != 0:
        # CI has them: there they must not be left out.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    with Network(3, "300mbit") as made:
        made.shape(2, "50mbit")
        made.block(1, 2)
        yield made


def check(found: dict[str, Any], names: list[str]) -> None:
    """What must have been found, whoever asked."""
    assert found["fit"] is False
    assert [host["name"] for host in found["network"]["hosts"]] == names
    links = {
        (link["source"], link["target"]): link
        for link in found["network"]["links"]
        if link["via"] == "network"
    }
    assert len(links) == 6  # of the three that are there
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
    """Three hosts, the first with two ranks, started as a job would be."""
    processes, outputs = [], [tmp_path / f"output-{host}" for host in range(3)]
    for host, path in enumerate(outputs):
        options = ["--nnodes", "3", "--node-rank", str(host), "--nproc-per-node", "2"]
        options += ["--master-addr", network.addresses[0], "--master-port", "29514"]
        doctor = ["-m", "phalanx", "doctor", "--save", str(tmp_path / "found.json")]
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
    """MPI says who they are; the store of rank 0 outlives what the others have to say."""
    path = tmp_path / "found.json"
    ended = mpi.run(library, 3, [PHALANX, "doctor", "--save", str(path)])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    network = json.loads(path.read_text())["network"]
    assert [host["ranks"] for host in network["hosts"]] == [[0, 1, 2]]
    assert len(network["links"]) == 6
    assert all(link["bandwidth"] > 0 for link in network["links"])


def test_peers_over_ssh(tmp_path: Path) -> None:
    """Two that are there, and three that ssh doesn't get into, each for a reason of its own."""
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
        command = [PHALANX, "doctor", "--ssh", hosts.ssh, "--save", str(path), "--peers"]
        command.append(",".join(["node-0", "node-1", *absent]))
        ended = subprocess.run(
            ["ip", "netns", "exec", network.names[2], *command],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "PHALANX_JOBS_DIR": str(tmp_path / "jobs")},
        )
        assert hosts.processes("--answer") == []
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = json.loads(path.read_text())
    check(found, ["here", "node-0", "node-1", *absent])
    words = [each["words"] for each in found["findings"] if each["name"] == "absent"]
    assert [each.partition(" (ssh: ")[0] for each in words] == [
        "node-locked: ssh would ask for a password, or its key isn't accepted",
        "node-stranger: ssh doesn't know that machine's key, or it has changed",
        "node-closed: nothing listens for ssh there",
    ]


WIRE = """
import sys
from phalanx.doctor.peers.tcp_probe import Answering, Unreached, measure
address, what = sys.argv[1:3]
if what == "answer":
    answering = Answering(address, b"t" * 32)
    print(answering.port, flush=True)
    sys.stdin.read()
else:
    try:
        print(measure(address, int(what), b"t" * 32))
    except Unreached as error:
        print(error)
"""


def test_a_network_that_drops_large_packets() -> None:
    """As where a tunnel carries less than the MTU of the interfaces says, and nobody is told."""
    if MISSING or os.geteuid() != 0:
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    with Network(2) as network:
        # A token bucket never lets through a packet that is larger than itself.
        network.shape(0, "100mbit", burst="1000b")
        command = [sys.executable, "-c", WIRE, network.addresses[1]]
        inside = [["ip", "netns", "exec", name, *command] for name in network.names]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([*inside[1], "answer"], **pipes) as answering:
            port = answering.stdout.readline().strip()
            ended = subprocess.run(
                [*inside[0], port], capture_output=True, text=True, timeout=LIMIT
            )
            answering.communicate(timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("small packets pass, large ones don't: "), ended.stdout
