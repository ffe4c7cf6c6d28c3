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

LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
BARE_PYTHON = getattr(sys, "_base_executable", sys.executable)
"""The interpreter below the virtual environment: it has no Phalanx."""


GONE = (
    "phalanx run: the connection to node-1, or the launcher there, is gone "
    "stopped because of it: node-0$"
)


class Shell:
    """Where a user sits: a machine beside the hosts, with a script in its directory."""

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
        return ended(self.start(*arguments))

    def nothing_left(self) -> None:
        """Every launcher and rank ends on all hosts, while their ssh servers go on."""
        end = time.monotonic() + 20
        while left := self.hosts.processes("phalanx.cli.remote_launcher") + self.hosts.processes(
            "script.py"
        ):
            assert time.monotonic() < end, [process.cmdline() for process in left]
            psutil.wait_procs(left, timeout=1)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def own(err: str) -> str:
    """What the shell's command says itself, in one line: not the ranks, nor what explains it.

    Whom it waits for isn't in it either: it says so where a host takes its time.
    """
    others = ("[", "phalanx run: waiting for ")
    lines = [line for line in err.partition("\n\n")[0].splitlines() if not line.startswith(others)]
    return " ".join(line.strip() for line in lines)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    if MISSING or os.geteuid() != 0:
        reason = f"needs root, iproute2 and OpenSSH (missing: {MISSING}, user {os.geteuid()})"
        # CI has them: there they must not be left out.
        (pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip)(reason)
    folder = tmp_path_factory.mktemp("ssh")
    hidden = folder / "hidden"
    hidden.mkdir()
    with Network(3) as network, SshHosts(network, folder, 2, hidden) as made:
        yield made


@pytest.fixture
def shell(hosts: SshHosts, tmp_path: Path) -> Iterator[Shell]:
    made = Shell(hosts, tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()
    made.nothing_left()


def test_two_hosts_from_one_shell(shell: Shell) -> None:
    """Ranks are numbered host after host and find each other; arguments arrive as they were."""
    name = shell.script(
        """
import torch, torch.distributed as dist, phalanx
with phalanx.init() as session:
    tensor = torch.full((300_000,), float(session.rank + 1))
    dist.all_reduce(tensor)
    kind = type(dist.group.WORLD._native).__name__
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
        where = shell.hosts.network.names[rank // 2]
        assert lines[0] == f"sum 10.0 HierarchicalGroup {where} {shell.directory}"
        assert lines[1] == f"""{arguments} a "secret" x=y z None"""
        assert lines[2:] == [f"line {number}" for number in range(300)]
        assert f"[rank {rank}] to stderr\n" in err
    assert len(out.splitlines()) == 4 * 302


def test_a_rank_that_is_killed(shell: Shell) -> None:
    """The host that knows most is believed, the exit code is that rank's, the others end."""
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
    story = own(err)
    assert re.match(r"phalanx run: on node-1: rank 2 \(pid \d+\) was killed by SIGKILL", story), err
    assert story.endswith(" stopped because of it: node-0"), err
    assert re.search(r"^To see this again, on node-1: phalanx explain \S+$", err, re.MULTILINE), err
    shell.nothing_left()


def waiting(shell: Shell) -> subprocess.Popen[str]:
    """A job whose three ranks only wait, as soon as they do."""
    name = shell.script("print('ready', flush=True)\ntime.sleep(100)\n")
    process = shell.start("--hosts", "node-0:1,node-1:2", name)
    assert process.stdout is not None
    lines = sorted(process.stdout.readline() for _ in range(3))
    assert lines == [f"[rank {rank}] ready\n" for rank in range(3)]
    return process


def check_key(shell: Shell) -> None:
    """All ranks have the job's key, and nobody sees it in a list of processes."""
    ranks = 0
    for process in shell.hosts.processes(""):
        with contextlib.suppress(psutil.NoSuchProcess):
            environment = process.environ()
            ranks += "PHALANX_KEY_FD" in environment
            seen = " ".join((*process.cmdline(), *environment.values()))
            assert not re.search("[0-9a-f]{64}", seen), seen
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
    return 1, GONE


def kill_the_shell(shell: Shell, process: subprocess.Popen[str]) -> tuple[int, str]:
    process.kill()
    return -signal.SIGKILL, ""


def kill_a_launcher(shell: Shell, process: subprocess.Popen[str]) -> tuple[int, str]:
    for launcher in shell.hosts.processes("phalanx.cli.remote_launcher"):
        if len(launcher.children()) == 2:
            launcher.kill()
    return 1, GONE


@pytest.mark.parametrize("end", (interrupt, break_connection, kill_the_shell, kill_a_launcher))
def test_nothing_is_left(
    shell: Shell, end: Callable[[Shell, subprocess.Popen[str]], tuple[int, str]]
) -> None:
    process = waiting(shell)
    code, words = end(shell, process)
    got, _, err = ended(process)
    assert got == code, err
    assert re.match(words, own(err)), err
    shell.nothing_left()


def test_nobody_reads_any_more(shell: Shell) -> None:
    """As in `phalanx run ... | head`: that is no signal that would end a launcher."""
    name = shell.script("while True:\n    print('more', flush=True)\n    time.sleep(0.05)\n")
    process = shell.start("--hosts", "node-0:1,node-1:1", name)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    start = time.monotonic()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert time.monotonic() - start < 20, "the hosts had to be let go"
    process.stdout = None
    shell.nothing_left()


WRONG = {
    "node-locked": "node-locked doesn't let ssh in without a password: `ssh-copy-id node-locked`",
    "node-stranger": "ssh doesn't know the host key of node-stranger: connect once by hand",
    "node-closed": "can't reach node-closed by ssh: .*[Cc]onnection refused",
    "node-gone": "can't reach node-gone by ssh: .*(No route to host|timed out)",
    "no such python": "node-1 can't run /no/python: install Python",
    "bare python": "on node-1 has no Phalanx, or one without --hosts: install",
}


def test_hosts_that_cannot_be_had(shell: Shell) -> None:
    """One line for each, within the time that ssh may take; at once, since each waits."""
    name = shell.script("print('never')\n")
    start = time.monotonic()
    processes = {}
    for what in WRONG:
        host = what if what.startswith("node") else "node-1"
        python = {"no such python": "/no/python", "bare python": BARE_PYTHON}.get(what)
        options = ["--remote-python", python] if python else []
        hosts = host if python else f"node-0,{host}"
        processes[what] = shell.start("--hosts", hosts, *options, name)
    for what, words in WRONG.items():
        code, out, err = ended(processes[what])
        assert (code, out, len(err.splitlines())) == (1, "", 1), (what, err)
        assert re.match(f"phalanx: error: .*{words}", err), err
    assert time.monotonic() - start < 60


PRETENDER = """#!/bin/sh
test "$(hostname)" = {host} && export PYTHONPATH={folder}
exec {python} "$@"
"""


def pretending(shell: Shell, what: str) -> str:
    """A Python that has another version of something on the second host, and this one elsewhere."""
    folder = shell.directory / what
    if what == "torch":
        info = folder / "torch-2.99.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Name: torch\nVersion: 2.99.0")
    else:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text("import phalanx\nphalanx.__version__ = '0.0.9'")
    python = shell.directory / f"python-{what}"
    host = shell.hosts.network.names[1]
    python.write_text(PRETENDER.format(host=host, folder=folder, python=sys.executable))
    python.chmod(0o755)
    return str(python)


def test_different_versions(shell: Shell) -> None:
    """One host pretends to have another version: there is only one here."""
    name = shell.script("print('never')\n")
    hosts = ("--hosts", "node-0,node-1", "--remote-python")
    versions = {"phalanx": "Phalanx 0.0.9", "torch": "torch 2.99.0"}
    started = {what: shell.start(*hosts, pretending(shell, what), name) for what in versions}
    for what, version in versions.items():
        code, out, err = ended(started[what])
        assert (code, out, len(err.splitlines())) == (1, "", 1), err
        assert err.startswith(f"phalanx: error: node-1 has {version}, "), err
        assert "install the same version everywhere" in err


def test_what_a_host_lacks(shell: Shell) -> None:
    """A directory, a script: the host that lacks it is named, and the other one doesn't wait."""
    name = shell.script("print('never')\n")
    hidden = shell.hosts.folder / "hidden" / "deep"
    hidden.mkdir(exist_ok=True)
    (hidden / name).touch()
    lacking = {
        "directory": shell.start("--hosts", "node-0:1,node-1:1", name, cwd=hidden),
        "script": shell.start("--hosts", "node-0:1,node-1:1", "nothing.py"),
    }
    code, out, err = ended(lacking["directory"])
    assert (code, out) == (2, "")
    words = f"phalanx run: on node-1: can't work in {hidden}: No such file or directory"
    assert own(err).startswith(words), err
    code, out, err = ended(lacking["script"])
    assert (code, out) == (2, "")
    assert re.match(r"phalanx run: on node-[01]: there is no script 'nothing.py'", own(err)), err
