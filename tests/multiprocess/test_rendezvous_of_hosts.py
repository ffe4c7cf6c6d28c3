"""How launchers of several hosts meet, with two of them on this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import os
import psutil, torch, torch.distributed as dist
import phalanx

with phalanx.init(timeout=60) as session:
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    launcher = psutil.Process(os.getppid())
    listens = {c.laddr.ip for c in launcher.net_connections() if c.status == "LISTEN"}
    print("sum", tensor[0].item(), os.environ["MASTER_ADDR"], *listens, flush=True)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, launch: Start) -> Start:
    """Start `phalanx run` with some options."""
    (tmp_path / "script.py").write_text(SCRIPT)
    return lambda *options: launch(*options, "script.py")


def test_hosts_that_may_come_and_go(start: Start, port: int) -> None:
    """The first one has the gate, and the other one finds that the port is taken."""
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "any"]
    both = [start("--nnodes", "2", "--rdzv-backend", "c10d", *endpoint) for _ in range(2)]
    ended = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    for out, _ in ended:
        assert "sum 2.0 127.0.0.1 127.0.0.1\n" in out


def test_other_numbers_of_hosts(start: Start, port: int) -> None:
    """Both hear of it, and end."""
    place = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    first = start("--nnodes", "2", "--node-rank", "0", *place)
    second = start("--nnodes", "3", "--node-rank", "1", *place)
    (_, said), (_, err) = first.communicate(), second.communicate()
    assert [first.returncode, second.returncode] == [1, 1]
    host = socket.gethostname()
    words = f"{host} was given --nnodes 3:3, {host} 2:2: give all hosts the same"
    assert err.splitlines()[-1].endswith(f"127.0.0.1:{port} doesn't let this host in: {words}")
    assert f"phalanx run: turned 127.0.0.1 away: {words}" in said
    assert said.splitlines()[-1].endswith(f"didn't meet at 127.0.0.1:{port}: {words}")


def test_nobody_comes(start: Start, port: int) -> None:
    """Who waits for host 0 says so, and Ctrl-C ends that."""
    place = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    process = start("--nnodes", "2", "--node-rank", "1", *place)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line == f"phalanx run: waiting for 127.0.0.1:{port} (Connection refused)\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "")
    assert process.returncode == 130
