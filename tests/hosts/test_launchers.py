"""`phalanx run --nnodes 2`: the launchers of two hosts start and end together."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.networks import Network

pytestmark = pytest.mark.slow

MISSING = [program for program in ("ip", "unshare") if shutil.which(program) is None]
LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
SCRIPT = """
import os, sys, time
rank = os.environ["RANK"]
print("ready", flush=True)
if sys.argv[1:] == [rank]:
    sys.exit(7)
while sys.argv[1:] != ["end"]:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if MISSING or os.geteuid() != 0:
        reason = f"needs root, iproute2 and util-linux (missing: {MISSING}, user {os.geteuid()})"
        # CI has them and must run these tests.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    with Network(2) as network:
        yield network


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(network: Network, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a launcher with two independent ranks on a host."""
    path = str(tmp_path / "script.py")
    Path(path).write_text(SCRIPT)
    started = []

    def launcher(
        host: int, port: int, *arguments: str, options: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        host_options = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "2"]
        host_options += ["--rdzv-endpoint", f"{network.addresses[0]}:{port}", *options]
        process = subprocess.Popen(
            # Without pid namespaces, so that signals reach the launcher.
            [
                "ip",
                "netns",
                "exec",
                network.names[host],
                PHALANX,
                "run",
                *host_options,
                path,
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield launcher
    for process in started:
        process.kill()
        process.communicate()


def wait_for_result(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the launcher's own lines, but not that about the missing key."""
    _, err = process.communicate(timeout=LIMIT)
    lines = [line for line in err.splitlines() if not line.startswith("[")]
    return process.returncode, "\n".join(line for line in lines if "has no key" not in line)


def test_success(start: Start) -> None:
    assert [wait_for_result(each) for each in [start(host, 29601, "end") for host in (0, 1)]] == [
        (0, "")
    ] * 2


@pytest.mark.parametrize("host", (0, 1))
def test_a_failed_rank_ends_all_hosts(start: Start, host: int) -> None:
    """Even if no rank waits for another one."""
    processes = [start(each, 29602 + host, str(2 * host)) for each in (0, 1)]
    failing, other = wait_for_result(processes[host]), wait_for_result(processes[1 - host])
    headline = rf"rank {2 * host} \(pid \d+\) exited with code 7"
    assert failing[0] == other[0] == 7
    assert re.match(
        rf"phalanx run: {headline}\n  stopped because of it: rank {2 * host + 1}$", failing[1]
    ), failing
    stopped = "2, 3" if host == 0 else "0, 1"
    assert re.match(
        rf"phalanx run: on \S+: {headline}\n  stopped because of it: rank {stopped}$", other[1]
    ), other


def test_ctrl_c_on_one_host_ends_all_hosts(start: Start) -> None:
    processes = [start(host, 29604) for host in (0, 1)]
    for process in processes:
        assert process.stdout is not None
        assert {process.stdout.readline().split()[-1] for _ in range(2)} == {"ready"}
    processes[1].send_signal(signal.SIGINT)
    assert wait_for_result(processes[1]) == (130, "phalanx run: stopped by SIGINT")
    code, err = wait_for_result(processes[0])
    assert code == 130
    pattern = r"phalanx run: on \S+: stopped by SIGINT\n  stopped because of it: rank 0, 1$"
    assert re.match(pattern, err), err


def test_a_killed_launcher(start: Start) -> None:
    """The launcher with the rendezvous; without it, the other host cannot continue."""
    processes = [start(host, 29605) for host in (0, 1)]
    for process in processes:
        assert process.stdout is not None
        assert {process.stdout.readline().split()[-1] for _ in range(2)} == {"ready"}
    processes[0].kill()
    code, err = wait_for_result(processes[1])
    assert code == 1
    lines = [line for line in err.splitlines() if not line.startswith("phalanx run: waiting for")]
    assert lines[0] == "phalanx run: lost the launcher of host 0, or the connection to it", err


def test_hosts_with_different_nnodes(start: Start) -> None:
    processes = [start(0, 29606), start(1, 29606, options=("--nnodes", "3"))]
    for process in processes:
        code, err = wait_for_result(process)
        assert code == 1
        assert re.search(r"^phalanx: error: .* was given --nnodes 3", err, re.MULTILINE), err
        assert "pass the same value on all hosts" in err


def test_absent_hosts(start: Start) -> None:
    """Both sides give up within the given time."""
    options = ("--rdzv-conf", "timeout=3")
    first = start(0, 29607, options=options)
    second = start(1, 29608, options=options)
    code, err = wait_for_result(first)
    assert code == 1
    assert (
        "host 1 of 2 did not join within 3 s: check that `phalanx run --node-rank N` is running"
        in err
    )
    code, err = wait_for_result(second)
    assert code == 1
    assert ":29608 was not reachable for 3 s (" in err
    assert err.splitlines()[-1].startswith("phalanx: error: ")


def test_ctrl_c_while_waiting(start: Start) -> None:
    process = start(0, 29609)
    assert process.stderr is not None
    while "waiting for host 1 of 2" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert wait_for_result(process) == (130, "")
