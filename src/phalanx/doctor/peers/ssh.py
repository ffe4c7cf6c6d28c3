"""Agents on other machines over ssh, each a process `phalanx doctor --answer` with pipes.

ssh never prompts (`BatchMode`). If it had to prompt, the host is reported as absent, with advice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from phalanx.doctor.network import listening_address
from phalanx.doctor.peers.agents import Agent, LocalAgent, Worker
from phalanx.doctor.peers.links import measure_network
from phalanx.errors import UsageError
from phalanx.launcher.ssh.connection import SSH_OPTIONS, resolve_address
from phalanx.launcher.ssh.plan import HostSpec
from phalanx.launcher.ssh.protocol import LineSplitter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.doctor.peers.links import Network

__all__ = ["measure_over_ssh", "parse_peer_names", "serve_stdin"]

_NAME = re.compile(r"[A-Za-z0-9_][\w.@:%-]*", re.ASCII)
_MARK = "phalanx-doctor "
"""Prefix of answers, which distinguishes them from the output of shells at startup."""
_IDLE_SECONDS = 900.0
"""Seconds that a host waits for the next command."""
_END_SECONDS = 3.0

# Pattern in ssh's error output, reason and advice; the first match counts.
_REASONS = (
    (
        "Permission denied",
        "ssh needs a password, or its key is not accepted",
        "Set up a key: run `ssh-copy-id {host}`; then `ssh {host} true` must not prompt.",
    ),
    (
        "Host key verification failed",
        "the host key is unknown to ssh, or it has changed",
        "Run `ssh {host}` manually once, and compare the key that it shows.",
    ),
    (
        "Could not resolve hostname",
        "the host name can't be resolved",
        "Check the spelling of the name, /etc/hosts and ~/.ssh/config.",
    ),
    (
        "Connection refused",
        "no ssh server is listening there",
        "Start sshd there, or set its port in ~/.ssh/config.",
    ),
    (
        "timed out|No route to host|Network is unreachable",
        "the host can't be reached",
        "Check that it is running and has a route: `ping {host}`, `ip route get ADDRESS`.",
    ),
    (
        "No module named|not found|No such file",
        "Phalanx was not found at the path of this machine's Python",
        "Install the same version there, or pass the path of its Python: --remote-python PATH.",
    ),
)


def parse_peer_names(text: str) -> list[str]:
    """Parse a list of hosts such as "node-a,user@node-b".

    Raises:
        UsageError: A name is empty, invalid or duplicate.
    """
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--peers is {text!r}: {name!r} is not a host name; expected names or addresses "
                "for ssh, separated by commas"
            )
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--peers is {text!r}: {duplicates[0]} occurs twice")
    return names


def measure_over_ssh(
    peers: Sequence[str], ssh: Sequence[str], python: str, on_progress: Callable[[str], None]
) -> Network:
    """Measure every pair of this machine and `peers`; blocks for some seconds for each host.

    Args:
        peers: Names of the other hosts for ssh.
        ssh: The ssh program and its options.
        python: Path of the Python on the peers that has Phalanx.
        on_progress: Callback that receives progress messages.
    """
    agents: dict[int, Agent] = {0: LocalAgent(Worker(lambda: _own_address(peers, ssh)))}
    with contextlib.ExitStack() as stack:
        stack.callback(agents[0].close)
        for number, name in enumerate(peers, 1):
            agents[number] = _SshAgent(name, ssh, python)
            stack.callback(agents[number].close)
        return measure_network(
            agents, [(number,) for number in agents], ("here", *peers), on_progress
        )


def _own_address(peers: Sequence[str], ssh: Sequence[str]) -> str:
    """Return this machine's address on the route to the first peer that has a route."""
    for name in peers:
        if address := listening_address(resolve_address(HostSpec(name, None), ssh)):
            return address
    return listening_address()


def serve_stdin() -> None:
    """Carry out commands, one a line, from stdin until it ends or is silent; answer on stdout.

    An answer has the number of its command.
    """
    # Other hosts are likely to reach this machine at the address at which ssh has reached it.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    ssh_address = connection[2] if len(connection) == 4 else ""
    interface = os.environ.get("PHALANX_INTERFACE", "")
    worker = Worker(lambda: ssh_address if ssh_address and not interface else listening_address())
    lines, stdin = LineSplitter(), sys.stdin.fileno()
    while select.select([stdin], [], [], _IDLE_SECONDS)[0] and (data := os.read(stdin, 1 << 16)):
        for line in lines.feed(data):
            command = json.loads(line)
            answer = {**worker.execute(command), "number": command["number"]}
            # The output of a shell at login may lack a final newline.
            sys.stdout.write(f"\n{_MARK}{json.dumps(answer)}\n")
            sys.stdout.flush()
    worker.close()


class _SshAgent(Agent):
    def __init__(self, host: str, ssh: Sequence[str], python: str) -> None:
        self._host = host
        remote = shlex.join([python, "-m", "phalanx", "doctor", "--answer"])
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        # A session of its own: Ctrl-C reaches only this process, which then closes the agent.
        self._process = subprocess.Popen(
            [*ssh, *SSH_OPTIONS, "--", host, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        self._number = 0
        self._buffer = b""

    def start(self, command: Mapping[str, Any]) -> None:
        self._number += 1
        request = {**command, "number": self._number}
        with contextlib.suppress(BrokenPipeError):  # answer() reports the error
            stdin: Any = self._process.stdin
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while True:
            line = self._read_line(end - time.monotonic())
            if line is None:
                return {"error": f"no answer over ssh within {seconds:g} s"}
            if not line:
                return {"error": self._failure_reason()}
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                if answer.pop("number") == self._number:  # else a late answer to an earlier command
                    return answer

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            stdin: Any = self._process.stdin
            stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._process.kill()
        self._process.wait()
        stdout: Any = self._process.stdout
        stdout.close()
        self._stderr.close()

    def _read_line(self, seconds: float) -> str | None:
        """Return the next line; empty at the end of the stream, None if none comes in time."""
        end = time.monotonic() + seconds
        stdout: Any = self._process.stdout
        while b"\n" not in self._buffer:
            remaining = end - time.monotonic()
            if remaining <= 0 or not select.select([stdout], [], [], remaining)[0]:
                return None
            if not (part := os.read(stdout.fileno(), 1 << 16)):
                return ""
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return f"{line.decode(errors='replace')}\n"

    def _failure_reason(self) -> str:
        """Return why there is no answer: the reason, a newline, and advice."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else f"exit code {self._process.returncode}"
        for pattern, reason, advice in _REASONS:
            if any(re.search(pattern, line) for line in lines):
                return f"{reason} (ssh: {last})\n{advice.format(host=self._host)}"
        return f"ssh failed: {last}\nRun `phalanx doctor` on {self._host} manually."
