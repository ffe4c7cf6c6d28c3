"""Real networks: hosts are namespaces that share neither memory nor the loopback interface."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.networks import Network

pytestmark = pytest.mark.slow

MISSING = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
REASON = f"needs root, iproute2 and util-linux (missing: {MISSING}, user {os.geteuid()})"
LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if MISSING or os.geteuid() != 0:
        # CI has them and must run these tests.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    with Network(2) as network:
        yield network


SCRIPT = """
import os, signal, sys, time
import psutil, torch, torch.distributed as dist
import phalanx

scenario = sys.argv[1]
with phalanx.init(timeout=8 if scenario in ("cut", "slow") else 30) as session:
    tensor = torch.full((300_000,), float(session.rank + 1))
    dist.all_reduce(tensor)
    total = sum(range(1, session.world_size + 1))
    assert (tensor == total).all()
    listens = [
        " ".join({c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"})
        for process in (psutil.Process(), psutil.Process(os.getppid()))
    ]
    kind = type(dist.group.WORLD._membership.native).__name__
    print("sum", total, "group", kind, "listens", *listens, sep="|", flush=True)
    if scenario == "fine":
        sys.exit()
    try:
        print("ready", flush=True)
        while True:
            start = time.monotonic()
            dist.all_reduce(tensor)
            time.sleep(0.01)
    except phalanx.PhalanxError as error:
        late = f"after {time.monotonic() - start:.1f} s"
        print("caught", type(error).__name__, error, late, flush=True)
        # When the first rank ends, the launcher stops the other ranks of its host.
        while not os.path.exists(os.path.join(os.path.dirname(__file__), "over")):
            time.sleep(0.01)
        os._exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


class Job:
    """`phalanx run` on both hosts, with its output so far."""

    def __init__(self, network: Network, script: Path, scenario: str, port: int) -> None:
        self.outputs = [script.with_name(f"{scenario}-{host}") for host in range(2)]
        self.processes = []
        for host, path in enumerate(self.outputs):
            options = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "2"]
            options += ["--master-addr", network.addresses[0], "--master-port", str(port)]
            command = [PHALANX, "run", *options, str(script), scenario]
            environment = {"PHALANX_JOBS_DIR": str(script.parent / f"jobs-{host}")}
            with path.open("w") as file:
                self.processes.append(network.start(host, command, environment, file))

    def text(self, host: int) -> str:
        return self.outputs[host].read_text()

    def wait_for(self, text: str, times: int) -> None:
        end = time.monotonic() + LIMIT
        while sum(self.text(host).count(text) for host in range(2)) < times:
            assert time.monotonic() < end, f"no {text!r} in:\n{self.text(0)}{self.text(1)}"
            time.sleep(0.02)

    def end(self, *hosts: int) -> list[int]:
        self.outputs[0].with_name("over").touch()
        try:
            return [self.processes[host].wait(LIMIT) for host in hosts]
        except subprocess.TimeoutExpired:
            pytest.fail(f"it hangs:\n{self.text(0)}{self.text(1)}")
        finally:
            for process in self.processes:
                process.kill()
                process.wait()


def test_two_hosts(network: Network, script: Path) -> None:
    """Ranks detect who shares a host, and listen only on the address that faces the other host."""
    job = Job(network, script, "fine", 29511)
    assert job.end(0, 1) == [0, 0], job.text(0) + job.text(1)
    for host, address in enumerate(network.addresses):
        found = re.findall(
            r"sum\|10\|group\|HierarchicalGroup\|listens\|(.*)\|(.*)", job.text(host)
        )
        assert len(found) == 2
        for rank, launcher in found:
            assert rank == address
            # Host 0 hosts the rendezvous.
            rendezvous_address = {address} if host == 0 else set()
            assert set(launcher.split()) == {"127.0.0.1"} | rendezvous_address


def test_a_killed_host(network: Network, script: Path) -> None:
    job = Job(network, script, "dies", 29512)
    job.wait_for("ready", 4)
    job.processes[1].send_signal(signal.SIGKILL)
    job.wait_for("caught", 2)
    job.end(0)
    caught = re.findall(
        r"caught PeerLost .*: rank ([23]) \(pid \d+ on (\S+)\) has died", job.text(0)
    )
    assert len(caught) == 2, job.text(0)


def test_a_severed_link(script: Path) -> None:
    """There is no notification; at the deadline, all ranks name the ranks that they wait for."""
    if MISSING or os.geteuid() != 0:
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    with Network(2) as network:
        job = Job(network, script, "cut", 29513)
        job.wait_for("ready", 4)
        network.disconnect(1)
        job.wait_for("caught", 4)
        job.end(0, 1)
        for host in range(2):
            caught = re.findall(r"caught (CollectiveTimeout|PeerLost) ", job.text(host))
            assert len(caught) == 2, job.text(host)


def test_the_others_shrink_when_a_host_is_killed() -> None:
    """The program checks that two hosts are left, and their results; the time is not tested."""
    if MISSING or os.geteuid() != 0:
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    program = Path(__file__).parents[2] / "benchmarks" / "shrink_networks.py"
    command = [sys.executable, str(program), "--trials", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("4 survivors: "), ended.stdout


def test_a_link_that_is_too_slow(script: Path) -> None:
    """Data arrives too slowly; at the deadline, all ranks name the ranks that they wait for."""
    if MISSING or os.geteuid() != 0:
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(REASON)
    with Network(2) as network:
        job = Job(network, script, "slow", 29514)
        job.wait_for("ready", 4)
        network.shape(1, "64kbit", "4kb")
        job.wait_for("caught", 4)
        job.end(0, 1)
        for host in range(2):
            named = r"caught (?:CollectiveTimeout|PeerLost) .*: .*\brank \d \(pid \d+ on \S+\)"
            caught = re.findall(named, job.text(host))
            assert len(caught) == 2, job.text(host)
