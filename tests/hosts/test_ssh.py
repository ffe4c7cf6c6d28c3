"""`phalanx run --hosts`: a real ssh server on each host, and processes that are really killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.networks import Network
from tests.ssh_hosts import MISSING, SshHosts

pytestmark = pytest.mark.slow

LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
BARE_PYTHON = getattr(sys, "_base_executable", sys.executable)
"""The interpreter below the virtual environment: it has no Phalanx."""


LOST = (
    "phalanx run: lost the launcher on node-1, or the connection to it "
    "stopped because of it: node-0$"
)


class Shell:
    """The user's shell: a machine beside the hosts, with a script in its directory."""

    def __init__(self, hosts: SshHosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self.started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        (self.directory / name).write_text(f"import os, sys, time\n{text}")
        return name

    def start(self, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        namespace = self.hosts.network.names[-1]
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, PHALANX, "run", "--ssh", self.hosts.ssh, *arguments],
            cwd=cwd or self.directory,
            env={**os.environ, "TOKEN": 'a "secret"', "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return wait_for_result(self.start(*arguments))

    def check_no_process_left(self) -> None:
        """Check that every launcher and rank ends on all hosts; the ssh servers continue."""
        end = time.monotonic() + 20
        while remaining := self.hosts.processes(
            "phalanx.cli.remote_launcher"
        ) + self.hosts.processes("script.py"):
            assert time.monotonic() < end, [process.cmdline() for process in remaining]
            psutil.wait_procs(remaining, timeout=1)


def wait_for_result(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def launcher_line(err: str) -> str:
    """Return the lines of the local launcher as one, without those of ranks and the explanation.

    The lines about hosts that it waits for are omitted: they appear only if a host is slow.
    """
    other_prefixes = ("[", "phalanx run: waiting for ")
    lines = [
        line
        for line in err.partition("\n\n")[0].splitlines()
        if not line.startswith(other_prefixes)
    ]
    return " ".join(line.strip() for line in lines)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    if MISSING or os.geteuid() != 0:
        reason = f"needs root, iproute2 and OpenSSH (missing: {MISSING}, user {os.geteuid()})"
        # CI has them and must run these tests.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    folder = tmp_path_factory.mktemp("ssh")
    hidden = folder / "hidden"
    hidden.mkdir()
    with Network(3) as network, SshHosts(network, folder, 2, hidden) as hosts:
        yield hosts


@pytest.fixture
def shell(hosts: SshHosts, tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(hosts, tmp_path)
    yield shell
    for process in shell.started:
        process.kill()
        process.communicate()
    shell.check_no_process_left()


def test_two_hosts_from_one_shell(shell: Shell) -> None:
    """Ranks are numbered by host and form a group; arguments arrive unchanged."""
    name = shell.script(
        """
import torch, torch.distributed as dist, phalanx
with phalanx.init() as session:
    tensor = torch.full((300_000,), float(session.rank + 1))
    dist.all_reduce(tensor)
    kind = type(dist.group.WORLD._membership.native).__name__
    print("sum", tensor[0].item(), kind, os.uname().nodename, os.getcwd())
    print(sys.argv[1:], os.environ["TOKEN"], os.environ["OTHER"], os.environ.get("COLUMNS"))
    for line in range(300):
        print("line", line)
    print("to stderr", file=sys.stderr)
"""
    )
    arguments = ["a b", "it's", '"$HOME"', "*", "\\", "", "--hosts", "é\n;"]
    options = ["--export", "TOKEN", "--export", "OTHER=x=y z"]
    code, out, err = shell.run("--hosts", "node-0:2,node-1:2", *options, name, *arguments)
    assert code == 0, err
    for rank in range(4):
        lines = re.findall(rf"^\[rank {rank}\] (.*)$", out, re.MULTILINE)
        hostname = shell.hosts.network.names[rank // 2]
        assert lines[0] == f"sum 10.0 HierarchicalGroup {hostname} {shell.directory}"
        assert lines[1] == f"""{arguments} a "secret" x=y z None"""
        assert lines[2:] == [f"line {number}" for number in range(300)]
        assert f"[rank {rank}] to stderr\n" in err
    assert len(out.splitlines()) == 4 * 302


def test_a_killed_rank(shell: Shell) -> None:
    """The report is that of the rank's host, the exit code that rank's, and the others end."""
    name = shell.script(
        """
import torch, torch.distributed as dist, phalanx
with phalanx.init() as session:
    dist.all_reduce(torch.ones(3))
    if session.rank == 2:
        os.kill(os.getpid(), 9)
    while True:
        dist.all_reduce(torch.ones(3))
"""
    )
    code, _, err = shell.run("--hosts", "node-0:1,node-1:2", name)
    assert code == 128 + signal.SIGKILL
    line = launcher_line(err)
    assert re.match(r"phalanx run: on node-1: rank 2 \(pid \d+\) was killed by SIGKILL", line), err
    assert line.endswith(" stopped because of it: node-0"), err
    assert re.search(r"^To see this again, on node-1: phalanx explain \S+$", err, re.MULTILINE), err
    shell.check_no_process_left()


def start_waiting_job(shell: Shell) -> subprocess.Popen[str]:
    """Start a job of three ranks that sleep, and return when all have started."""
    name = shell.script("print('ready', flush=True)\ntime.sleep(100)\n")
    process = shell.start("--hosts", "node-0:1,node-1:2", name)
    assert process.stdout is not None
    lines = sorted(process.stdout.readline() for _ in range(3))
    assert lines == [f"[rank {rank}] ready\n" for rank in range(3)]
    return process


def check_key(shell: Shell) -> None:
    """Check that all ranks have the job's key, and that no list of processes shows it."""
    ranks = 0
    for process in shell.hosts.processes(""):
        with contextlib.suppress(psutil.NoSuchProcess):
            environment = process.environ()
            ranks += "PHALANX_KEY_FD" in environment
            visible = " ".join((*process.cmdline(), *environment.values()))
            assert not re.search("[0-9a-f]{64}", visible), visible
    assert ranks == 3


def interrupt(shell: Shell, process: subprocess.Popen[str]) -> tuple[int, str]:
    check_key(shell)
    process.send_signal(signal.SIGINT)
    return 128 + signal.SIGINT, "phalanx run: stopped by SIGINT"


def break_connection(shell: Shell, process: subprocess.Popen[str]) -> tuple[int, str]:
    (ssh,) = [
        child for child in psutil.Process(process.pid).children() if "node-1" in child.cmdline()
    ]
    ssh.kill()
    return 1, LOST


def kill_the_local_launcher(shell: Shell, process: subprocess.Popen[str]) -> tuple[int, str]:
    process.kill()
    return -signal.SIGKILL, ""


def kill_a_remote_launcher(shell: Shell, process: subprocess.Popen[str]) -> tuple[int, str]:
    for launcher in shell.hosts.processes("phalanx.cli.remote_launcher"):
        if len(launcher.children()) == 2:
            launcher.kill()
    return 1, LOST


@pytest.mark.parametrize(
    "end", (interrupt, break_connection, kill_the_local_launcher, kill_a_remote_launcher)
)
def test_no_process_is_left(
    shell: Shell, end: Callable[[Shell, subprocess.Popen[str]], tuple[int, str]]
) -> None:
    process = start_waiting_job(shell)
    code, message = end(shell, process)
    got, _, err = wait_for_result(process)
    assert got == code, err
    assert re.match(message, launcher_line(err)), err
    shell.check_no_process_left()


def test_a_closed_output(shell: Shell) -> None:
    """As in `phalanx run ... | head`; a launcher would not end because of SIGPIPE."""
    name = shell.script("while True:\n    print('more', flush=True)\n    time.sleep(0.05)\n")
    process = shell.start("--hosts", "node-0:1,node-1:1", name)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    process.stdout = None
    shell.check_no_process_left()


UNUSABLE_HOSTS = {
    "node-locked": "ssh to node-locked requires a password: install your key with "
    "`ssh-copy-id node-locked`",
    "node-stranger": "ssh does not know the host key of node-stranger: connect once by hand",
    "node-closed": "can't reach node-closed by ssh: .*[Cc]onnection refused",
    "node-gone": "can't reach node-gone by ssh: .*(No route to host|timed out)",
    "no such python": "node-1 can't run /no/python: install Python",
    "bare python": "on node-1 lacks Phalanx, or has a version without --hosts: install",
}


def test_unusable_hosts(shell: Shell) -> None:
    """One line for each, within the time limit of ssh; all at once, because each waits."""
    name = shell.script("print('never')\n")
    processes = {}
    for case in UNUSABLE_HOSTS:
        host = case if case.startswith("node") else "node-1"
        python = {"no such python": "/no/python", "bare python": BARE_PYTHON}.get(case)
        options = ["--remote-python", python] if python else []
        hosts = host if python else f"node-0,{host}"
        processes[case] = shell.start("--hosts", hosts, *options, name)
    for case, message in UNUSABLE_HOSTS.items():
        code, out, err = wait_for_result(processes[case])
        assert (code, out, len(err.splitlines())) == (1, "", 1), (case, err)
        assert re.match(f"phalanx: error: .*{message}", err), err


PYTHON_WRAPPER = """#!/bin/sh
test "$(hostname)" = {host} && export PYTHONPATH={folder}
exec {python} "$@"
"""


def make_python_with_version(shell: Shell, package: str) -> str:
    """Return a Python with another version of a package on the second host only."""
    folder = shell.directory / package
    if package == "torch":
        info = folder / "torch-2.99.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Name: torch\nVersion: 2.99.0")
    else:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text("import phalanx\nphalanx.__version__ = '0.0.9'")
    python = shell.directory / f"python-{package}"
    host = shell.hosts.network.names[1]
    python.write_text(PYTHON_WRAPPER.format(host=host, folder=folder, python=sys.executable))
    python.chmod(0o755)
    return str(python)


def test_different_versions(shell: Shell) -> None:
    """One host pretends to have another version, because only one is installed here."""
    name = shell.script("print('never')\n")
    hosts = ("--hosts", "node-0,node-1", "--remote-python")
    versions = {"phalanx": "Phalanx 0.0.9", "torch": "torch 2.99.0"}
    started = {
        package: shell.start(*hosts, make_python_with_version(shell, package), name)
        for package in versions
    }
    for package, version in versions.items():
        code, out, err = wait_for_result(started[package])
        assert (code, out, len(err.splitlines())) == (1, "", 1), err
        assert err.startswith(f"phalanx: error: node-1 has {version}, "), err
        assert "install the same version everywhere" in err


def test_a_missing_directory_or_script(shell: Shell) -> None:
    """The host without the directory or script is named, and the other one does not wait."""
    name = shell.script("print('never')\n")
    hidden = shell.hosts.folder / "hidden" / "deep"
    hidden.mkdir(exist_ok=True)
    (hidden / name).touch()
    processes = {
        "directory": shell.start("--hosts", "node-0:1,node-1:1", name, cwd=hidden),
        "script": shell.start("--hosts", "node-0:1,node-1:1", "nothing.py"),
    }
    code, out, err = wait_for_result(processes["directory"])
    assert (code, out) == (2, "")
    message = f"phalanx run: on node-1: can't use directory {hidden}: No such file or directory"
    assert launcher_line(err).startswith(message), err
    code, out, err = wait_for_result(processes["script"])
    assert (code, out) == (2, "")
    assert re.match(
        r"phalanx run: on node-[01]: there is no script 'nothing.py'", launcher_line(err)
    ), err
