"""Processes that wait to join a group, and how others see their end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.backend.newcomers import Probes, Process
from phalanx.system.host_identity import host_identity
from phalanx.system.polling import wait_until
from phalanx.system.processes import ProcessIdentity
from phalanx.transports.liveness import LivenessProbe
from tests.ports import find_free_port


def test_an_ended_process_whose_port_and_pid_another_one_has() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
        Probes() as probes,
    ):
        endpoint = f"{server.getsockname()[1]} 127.0.0.1"
        own = ProcessIdentity.own()
        assert not probes.has_gone(Process(own, "", endpoint))
        assert probes.has_gone(Process(own._replace(start=own.start - 1), "", endpoint))
        start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        other = Process(own._replace(pid=child.pid, start=start), "", endpoint)
        assert not probes.has_gone(other)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert probes.has_gone(other)  # not reaped yet
        child.wait()
        assert probes.has_gone(other)


def test_a_process_of_another_host_is_seen_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Probes() as probes:
        elsewhere = ProcessIdentity.own()._replace(host="another one")
        endpoint = f"{server.getsockname()[1]} 127.0.0.1"
        process = Process(elsewhere, host_identity("net"), endpoint)
        assert not probes.has_gone(process)
        server.close()
        assert probes.has_gone(process)


def test_a_probe_does_not_take_itself_for_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that is given the port of the peer connects to itself if nobody listens there."""
    port = find_free_port()
    connect = socket.socket.connect

    def from_the_same_port(self: socket.socket, address: tuple[str, int]) -> None:
        self.bind(address)
        connect(self, address)

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "connect", from_the_same_port)
        assert "refused" in LivenessProbe(f"{port} 127.0.0.1").detect_failure()
    assert wait_until(LivenessProbe(f"{port} 127.0.0.1").detect_failure, 10)
