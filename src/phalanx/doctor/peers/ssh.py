"""Agents on other machines over ssh, each a process `phalanx doctor --answer` with pipes.

ssh never prompts (`BatchMode`). If it had to prompt, the host is reported as absent, with advice.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from phalanx.doctor.network import listening_address
from phalanx.doctor.peers.agents import Agent, LocalAgent, Worker
from phalanx.doctor.peers.links import measure_network
from phalanx.errors import UsageError
from phalanx.system.ssh import (
    LineSplitter,
    SshProcess,
    pack_message,
    resolve_address,
    unpack_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.doctor.peers.links import Network

_NAME = re.compile(r"[A-Za-z0-9_][\w.@:%-]*", re.ASCII)
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
        if address := listening_address(resolve_address(name, ssh)):
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
            if command := unpack_message(line):
                answer = {**worker.execute(command), "number": command["number"]}
                sys.stdout.buffer.write(pack_message(**answer))
                sys.stdout.flush()
    worker.close()


class _SshAgent(Agent):
    def __init__(self, host: str, ssh: Sequence[str], python: str) -> None:
        self._host = host
        self._process = SshProcess(host, ssh, [python, "-m", "phalanx", "doctor", "--answer"])
        self._open = list(self._process.descriptors)
        self._errors: list[str] = []
        """The lines that ssh and the host have written to stderr."""
        self._number = 0

    def start(self, command: Mapping[str, Any]) -> None:
        self._number += 1
        self._process.write(pack_message(**{**command, "number": self._number}))

    def answer(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while self._process.descriptors[0] in self._open:
            if (remaining := end - time.monotonic()) <= 0:
                return {"error": f"no answer over ssh within {seconds:g} s"}
            for line in self._read(remaining):
                # A different number is that of an earlier command, whose answer is late.
                answer = unpack_message(line)
                if answer and answer.pop("number") == self._number:
                    return answer
        return {"error": self._failure_reason()}

    def close(self) -> None:
        self._process.close(_END_SECONDS)

    def _read(self, seconds: float) -> list[bytes]:
        """Wait for output; keep the lines of stderr, and return those of stdout."""
        found: list[bytes] = []
        for descriptor in select.select(self._open, [], [], seconds)[0]:
            lines = self._process.read_lines(descriptor)
            if lines is None:
                self._open.remove(descriptor)
            elif descriptor == self._process.descriptors[0]:
                found = lines
            else:
                self._errors += [line.decode(errors="replace").strip() for line in lines]
        return found

    def _failure_reason(self) -> str:
        """Return why there is no answer: the reason, a newline, and advice."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        while self._open and select.select(self._open, [], [], 0)[0]:
            self._read(0)
        lines = [line for line in self._errors if line]
        last = lines[-1] if lines else f"exit code {self._process.returncode}"
        for pattern, reason, advice in _REASONS:
            if any(re.search(pattern, line) for line in lines):
                return f"{reason} (ssh: {last})\n{advice.format(host=self._host)}"
        return f"ssh failed: {last}\nRun `phalanx doctor` on {self._host} manually."
