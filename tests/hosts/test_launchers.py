"""`phalanx run --nnodes 2`, a launcher on each host: they start together, and end together."""

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

MISSING = [what for what in ("ip", "unshare") if shutil.which(what) is None]
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
        # CI has them: there they must not be left out.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    with Network(2) as made:
        yield made


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(network: Network, tmp_path: Path) -> Iterator[Start]:
    """Starts a launcher with two ranks on a host, which ranks of no host talk to."""
    path = str(tmp_path / "script.py")
    Path(path).write_text(SCRIPT)
    started = []

    def launcher(
        host: int, port: int, *arguments: str, options: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        own = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "2"]
        own += ["--rdzv-endpoint", f"{network.addresses[0]}:{port}", *options]
        process = subprocess.Popen(
            # Without pid namespaces: signals are to reach the launcher.
            ["ip", "netns", "exec", network.names[host], PHALANX, "run", *own, path, *arguments],
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


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its code, and what it says itself, but for the remark that the job has no key."""
    _, err = process.communicate(timeout=LIMIT)
    lines = [line for line in err.splitlines() if not line.startswith("[")]
    return process.returncode, "\n".join(line for line in lines if "has no key" not in line)


def test_all_end_well(start: Start) -> None:
    assert [ended(each) for each in [start(host, 29601, "end") for host in (0, 1)]] == [(0, "")] * 2


@pytest.mark.parametrize("host", (0, 1))
def test_a_rank_that_fails_ends_all(start: Start, host: int) -> None:
    """Though no rank waits for another one."""
    processes = [start(each, 29602 + host, str(2 * host)) for each in (0, 1)]
    here, there = ended(processes[host]), ended(processes[1 - host])
    headline = rf"rank {2 * host} \(pid \d+\) exited with code 7"
    assert here[0] == there[0] == 7
    assert re.match(
        rf"phalanx run: {headline}\n  stopped because of it: rank {2 * host + 1}$", here[1]
    ), here
    stopped = "2, 3" if host == 0 else "0, 1"
    assert re.match(
        rf"phalanx run: on \S+: {headline}\n  stopped because of it: rank {stopped}$", there[1]
    ), there


def test_ctrl_c_on_one_host_ends_all(start: Start) -> None:
    processes = [start(host, 29604) for host in (0, 1)]
    for process in processes:
        assert process.stdout is not None
        assert {process.stdout.readline().split()[-1] for _ in range(2)} == {"ready"}
    processes[1].send_signal(signal.SIGINT)
    assert ended(processes[1]) == (130, "phalanx run: stopped by SIGINT")
    code, err = ended(processes[0])
    assert code == 130
    words = r"phalanx run: on \S+: stopped by SIGINT\n  stopped because of it: rank 0, 1$"
    assert re.match(words, err), err


def test_a_launcher_that_is_killed(start: Start) -> None:
    """The one with the rendezvous: nobody else can know that the job goes on."""
    processes = [start(host, 29605) for host in (0, 1)]
    for process in processes:
        assert process.stdout is not None
        assert {process.stdout.readline().split()[-1] for _ in range(2)} == {"ready"}
    processes[0].kill()
    code, err = ended(processes[1])
    assert code == 1
    assert err.startswith("phalanx run: the launcher of host 0, or the way to it, is gone\n"), err


def test_hosts_that_disagree(start: Start) -> None:
    processes = [start(0, 29606), start(1, 29606, options=("--nnodes", "3"))]
    for process in processes:
        code, err = ended(process)
        assert code == 1
        assert re.search(r"^phalanx: error: .* was given --nnodes 3", err, re.MULTILINE), err
        assert "give all hosts the same" in err


def test_nobody_there(start: Start) -> None:
    """Within the time that was given, on both sides."""
    options = ("--rdzv-conf", "timeout=3")
    first = start(0, 29607, options=options)
    second = start(1, 29608, options=options)
    code, err = ended(first)
    assert code == 1
    assert "host 1 of 2 didn't come within 3 s: is `phalanx run --node-rank N` running" in err
    code, err = ended(second)
    assert code == 1
    assert ":29608 can't be reached for 3 s (" in err
    assert err.splitlines()[-1].startswith("phalanx: error: ")


def test_ctrl_c_while_waiting(start: Start) -> None:
    process = start(0, 29609)
    assert process.stderr is not None
    while "waiting for host 1 of 2" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, "")
