"""A rendezvous that is guarded by the job's key, between hosts that share a network with others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import key
from tests.networks import Network

PORT = 29541
LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
MISSING = [what for what in ("ip", "tc", "unshare") if shutil.which(what) is None]
SCRIPT = """
import pathlib, sys, time
import torch, torch.distributed as dist
import phalanx

with phalanx.init(timeout=60) as session:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    print("ready", flush=True)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)
    dist.all_reduce(tensor)
    print("sum", tensor.unique().tolist(), flush=True)
"""
STRANGER = """
import socket, sys

for garbage in (b"", b"GET / HTTP/1.1" + bytes(200), bytes(range(256)) * 20):
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as connection:
        try:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            heard = b""
            while part := connection.recv(4096):
                heard += part
        except ConnectionError:
            pass
        print(len(heard))
"""


@pytest.fixture
def network() -> Iterator[Network]:
    if MISSING or os.geteuid() != 0:
        reason = f"needs root, iproute2 and util-linux (missing: {MISSING})"
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    with Network(2) as made:
        yield made


class Host:
    """`phalanx run` on one host; its output as it comes."""

    def __init__(self, network: Network, number: int, folder: Path, key_file: Path) -> None:
        self.output = folder / f"host-{number}-{key_file.name}"
        script = folder / "script.py"
        script.write_text(SCRIPT)
        options = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
        options += ["--master-addr", network.addresses[0], "--master-port", str(PORT)]
        command = [PHALANX, "run", *options, "--key-file", str(key_file)]
        environment = {"PHALANX_JOBS_DIR": str(folder / f"jobs-{number}")}
        with self.output.open("w") as file:
            arguments = [str(script), str(folder / "go on")]
            self.process = network.start(number, [*command, *arguments], environment, file)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, words: str) -> None:
        end = time.monotonic() + LIMIT
        while words not in self.text:
            assert time.monotonic() < end, f"{words!r} didn't come:\n{self.text}"
            time.sleep(0.02)

    def end(self) -> int:
        try:
            return self.process.wait(LIMIT)
        finally:
            self.process.kill()
            self.process.wait()


def test_strangers_and_wrong_keys(network: Network, tmp_path: Path) -> None:
    """They are turned away, before the job and while it runs, and the job does what it would."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for path in (right, wrong):
        key.create_file(str(path))
    first = Host(network, 0, tmp_path, right)
    try:
        second = Host(network, 1, tmp_path, wrong)
        assert second.end() == 1
        *_, last = second.text.splitlines()
        gate = f"{network.addresses[0]}:{PORT}"
        assert last.startswith(f"phalanx: error: {gate} doesn't let this host in: it has another")
        first.wait_for(f"turned {network.addresses[1]} away: it has another key")
        second = Host(network, 1, tmp_path, right)
        second.wait_for("ready")
        command = [sys.executable, "-c", STRANGER, network.addresses[0], str(PORT)]
        stranger = network.start(1, command, output=subprocess.PIPE)
        heard = [int(size) for size in stranger.communicate(timeout=LIMIT)[0].split()]
        assert len(heard) == 3
        assert max(heard) <= 48  # a challenge and "no"
        (tmp_path / "go on").touch()
        assert (first.end(), second.end()) == (0, 0), first.text + second.text
        for host in (first, second):
            assert "sum [4.0]" in host.text
    finally:
        first.end()
