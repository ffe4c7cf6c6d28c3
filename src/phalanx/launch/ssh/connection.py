"""ssh to one host, and the launcher there."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.errors import LaunchError, UsageError
from phalanx.launch.ssh.places import HostPlace
from phalanx.launch.ssh.wire import Lines, pack, unpack

__all__ = ["OPTIONS", "Connection", "address_of"]

CONNECT_LIMIT = 10
"""Seconds that ssh may take to reach a host."""

CONFIGURATION_LIMIT = 10
"""Seconds that ssh may take to read its configuration."""

OPTIONS = (
    "-T",  # no terminal: nobody could type there
    *("-o", "BatchMode=yes"),  # a question becomes an error
    *("-o", f"ConnectTimeout={CONNECT_LIMIT}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6"),
)
_KEPT_LINES = 40
_SSH_FAILED = 255
_NO_PROGRAM = (126, 127)


class Connection:
    """One host's launcher, seen through the ssh that started it.

    Attributes:
        place: which host.
        hello: what it said of itself; None until then.
        end: how its part of the job ended, as it says; None until then.
        ended: monotonic seconds when it said so, or when the connection was found gone.
        started: whether it was told to start its ranks.
        stopped: whether it was told to stop before its end.
    """

    def __init__(self, place: HostPlace, ssh: Sequence[str], python: str) -> None:
        """Start ssh; doesn't wait for it.

        Raises:
            UsageError: there is no such program.
        """
        self.place = place
        self.hello: dict[str, Any] | None = None
        self.end: dict[str, Any] | None = None
        self.ended = 0.0
        self.started = self.stopped = False
        self._python = python
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        remote = shlex.join([python, "-m", "phalanx.cli.host"])
        try:
            # A session of its own: Ctrl-C at the terminal is for us, and we tell the hosts.
            self.process = subprocess.Popen(
                [*ssh, *OPTIONS, "--", place.target, remote],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(
                f"can't run {ssh[0]!r}: {error.strerror}; --hosts needs OpenSSH's client, or name "
                "another one with --ssh"
            ) from None
        # Given, since they are pipes.
        self._input: Any = self.process.stdin
        self._output: Any = self.process.stdout
        self._errors: Any = self.process.stderr
        self._lines = {descriptor: Lines() for descriptor in self.descriptors}

    @property
    def descriptors(self) -> tuple[int, int]:
        """What to read from: messages, and what ssh and the host say besides."""
        return self._output.fileno(), self._errors.fileno()

    def read(self, descriptor: int) -> Iterator[dict[str, Any]] | None:
        """The messages that have come; None when no more will. Blocks if nothing has come.

        What isn't a message comes as one of kind `said`, with its `line`.
        """
        data = os.read(descriptor, 1 << 16)
        lines = self._lines[descriptor].feed(data) if data else self._lines[descriptor].rest()
        if not data and not lines:
            return None
        return self._messages(lines, from_launcher=descriptor == self.descriptors[0])

    def _messages(self, lines: list[bytes], *, from_launcher: bool) -> Iterator[dict[str, Any]]:
        for line in lines:
            if self.hello is None and not line.strip():  # what stands before a hello
                continue
            message = unpack(line) if from_launcher else None
            if message is None:
                text = line.decode(errors="replace").rstrip()
                self._said.append(text)
                message = {"kind": "said", "line": text}
            elif message["kind"] == "hello":
                self.hello = message
            elif message["kind"] == "end":
                self.end, self.ended = message, time.monotonic()
            yield message

    def send(self, kind: str = "", **content: Any) -> None:
        """Send a message, or a sign of life; a connection that is gone is found by reading."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(pack(kind, **content) if kind else b"\n")
            self._input.flush()

    def start(self, **content: Any) -> None:
        """Have it start its ranks."""
        self.started = True
        self.send("start", **content)

    def stop(self, number: int) -> None:
        """Have it stop its ranks, as if it had got this signal."""
        self.stopped = True
        self.send("stop", signal=number)

    def close(self, patience: float) -> None:
        """Let go of the host, which then ends what it started; ssh itself ends here.

        Args:
            patience: seconds that ssh may take to end by itself.
        """
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.process.kill()
        self.process.wait()
        self._output.close()
        self._errors.close()

    def trouble(self) -> LaunchError:
        """Why the connection is gone: what to do about it, and what ssh said, which has ended."""
        code = self.process.returncode
        last = next((line for line in reversed(self._said) if line.strip()), "")
        name = self.place.name
        if self.hello is None:
            words = _advice(self.place, self._python, code, "\n".join(self._said))
        elif code in (_SSH_FAILED, -signal.SIGKILL):
            words = f"the connection to {name}, or the launcher there, is gone"
        else:
            words = f"the launcher on {name} ended with code {code} before its ranks did"
        who = "ssh" if code == _SSH_FAILED else "it"
        return LaunchError(f"{words} ({who} said: {last})" if last else words)


def _advice(place: HostPlace, python: str, code: int, text: str) -> str:
    """What to do when a host's launcher couldn't be started, by what ssh or the host said."""
    name, target = place.name, place.target
    by_hand = f"`ssh -o BatchMode=yes {target} true` must work"
    if "Host key verification failed" in text:
        return (
            f"ssh doesn't know the host key of {name}: connect once by hand, `ssh {target}`, and "
            "compare the fingerprint"
        )
    if "Permission denied" in text and code == _SSH_FAILED:
        return (
            f"{name} doesn't let ssh in without a password: `ssh-copy-id {target}` brings your key "
            f"there, `ssh-add` unlocks one; {by_hand}"
        )
    if code == _SSH_FAILED:
        return f"can't reach {name} by ssh: {by_hand}"
    if "No module named" in text and "phalanx" in text:
        return (
            f"{python} on {name} has no Phalanx, or one without --hosts: install the version that "
            "is here, or name another Python with --remote-python"
        )
    if code in _NO_PROGRAM:
        return (
            f"{name} can't run {python}: install Python and Phalanx there at the same place, or "
            "name the one that it has with --remote-python"
        )
    return f"Phalanx didn't start on {name}: code {code}"


def address_of(place: HostPlace, ssh: Sequence[str]) -> str:
    """The address of a host as ssh's configuration has it: a name there may be a nickname.

    Runs `ssh -G`, which connects to nobody.

    Raises:
        LaunchError: it doesn't end.
    """
    command = [*ssh, "-G", "--", place.target]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=CONFIGURATION_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{shlex.join(command)}` didn't end within {CONFIGURATION_LIMIT} s: see what ssh's "
            "configuration has it do (Match exec), or whether its files can be read"
        ) from None
    for line in found.stdout.splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname":
            return value
    return place.name
