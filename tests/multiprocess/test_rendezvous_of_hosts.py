"""The rendezvous of launchers of several hosts, with two of them on this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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
    """Return a function that starts `phalanx run` with some options."""
    (tmp_path / "script.py").write_text(SCRIPT)
    return lambda *options: launch(*options, "script.py")


def test_elastic_rendezvous(start: Start, port: int) -> None:
    """The first launcher has the store; the other one finds the port in use."""
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "any"]
    launchers = [start("--nnodes", "2", "--rdzv-backend", "c10d", *endpoint) for _ in range(2)]
    outputs = [process.communicate() for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], outputs
    for out, _ in outputs:
        assert "sum 2.0 127.0.0.1 127.0.0.1\n" in out


def test_hosts_with_different_nnodes(start: Start, port: int) -> None:
    """Both launchers report the mismatch and end."""
    endpoint = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    first = start("--nnodes", "2", "--node-rank", "0", *endpoint)
    second = start("--nnodes", "3", "--node-rank", "1", *endpoint)
    (_, first_err), (_, err) = first.communicate(), second.communicate()
    assert [first.returncode, second.returncode] == [1, 1]
    host = socket.gethostname()
    mismatch = (
        f"{host} was given --nnodes 3:3, but {host} was given 2:2: pass the same value on all hosts"
    )
    assert err.splitlines()[-1].endswith(f"can't join the job at 127.0.0.1:{port}: {mismatch}")
    assert f"phalanx run: rejected 127.0.0.1: {mismatch}" in first_err
    assert first_err.splitlines()[-1].endswith(
        f"the rendezvous of the hosts at 127.0.0.1:{port} failed: {mismatch}"
    )


def test_wait_for_host_0(start: Start, port: int) -> None:
    """The launcher reports that it waits for host 0, and Ctrl-C ends the wait."""
    endpoint = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    process = start("--nnodes", "2", "--node-rank", "1", *endpoint)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line == f"phalanx run: waiting for 127.0.0.1:{port} (Connection refused)\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "")
    assert process.returncode == 130
