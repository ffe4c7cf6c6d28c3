"""A rendezvous protected by the job's key, on a network shared with other hosts."""

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
MISSING = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
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
            reply = b""
            while part := connection.recv(4096):
                reply += part
        except ConnectionError:
            pass
        print(len(reply))
"""


@pytest.fixture
def network() -> Iterator[Network]:
    if MISSING or os.geteuid() != 0:
        reason = f"needs root, iproute2 and util-linux (missing: {MISSING})"
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    with Network(2) as network:
        yield network


class Host:
    """`phalanx run` on one host, with its output so far."""

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

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + LIMIT
        while text not in self.text:
            assert time.monotonic() < end, f"no {text!r} in:\n{self.text}"
            time.sleep(0.02)

    def end(self) -> int:
        try:
            return self.process.wait(LIMIT)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.mark.slow
def test_connections_without_the_key_are_rejected(network: Network, tmp_path: Path) -> None:
    """They are rejected before and during the job, and the job is not affected."""
    right_key, wrong_key = tmp_path / "right", tmp_path / "wrong"
    for path in (right_key, wrong_key):
        key.create_file(str(path))
    first = Host(network, 0, tmp_path, right_key)
    try:
        second = Host(network, 1, tmp_path, wrong_key)
        assert second.end() == 1
        *_, last = second.text.splitlines()
        endpoint = f"{network.addresses[0]}:{PORT}"
        assert last.startswith(
            f"phalanx: error: can't join the job at {endpoint}: the two hosts have different keys"
        )
        first.wait_for(f"rejected {network.addresses[1]}: it has a different key")
        second = Host(network, 1, tmp_path, right_key)
        second.wait_for("ready")
        command = [sys.executable, "-c", STRANGER, network.addresses[0], str(PORT)]
        stranger = network.start(1, command, output=subprocess.PIPE)
        reply_sizes = [int(size) for size in stranger.communicate(timeout=LIMIT)[0].split()]
        assert len(reply_sizes) == 3
        assert max(reply_sizes) <= 50  # a challenge and a rejection
        (tmp_path / "go on").touch()
        assert (first.end(), second.end()) == (0, 0), first.text + second.text
        for host in (first, second):
            assert "sum [4.0]" in host.text
    finally:
        first.end()
