"""The ssh client: programs on other hosts, connected by pipes that carry one message per line.

A message is JSON behind a mark, which distinguishes it from the output of the host's shell.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from phalanx.system.processes import ChildProcess
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIGURATION_TIMEOUT = 10
"""Seconds allowed for ssh to read its configuration."""

_MARK = b"\x1ephalanx "
_CONNECT_TIMEOUT = 10
_OPTIONS = (
    "-T",  # no terminal: there is no interactive input
    *("-o", "BatchMode=yes"),  # fail instead of prompting
    *("-o", f"ConnectTimeout={_CONNECT_TIMEOUT}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6"),
)


def parse_ssh_command(text: str, option: str = "--hosts") -> list[str]:
    """Split the value of `--ssh` into words.

    Args:
        text: The command in shell syntax.
        option: The name of the option that needs ssh, for the error message.

    Raises:
        UsageError: The value cannot be parsed, or there is no such program.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--ssh is {text!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise UsageError(
            f"there is no program {program!r}: {option} needs OpenSSH's client (the package "
            "openssh-client or openssh-clients); install it, or name another program with --ssh"
        )
    return words


def pack_message(**content: Any) -> bytes:
    """Encode a message as a line, after an empty one.

    The empty line ends the output of the host's shell, which may lack a final newline.
    """
    return b"\n" + _MARK + json.dumps(content).encode() + b"\n"


def unpack_message(line: bytes) -> dict[str, Any] | None:
    """Decode a line; return None if it is not a message, or if its end is missing."""
    if not (line.startswith(_MARK) and line.endswith(b"\n")):
        return None
    try:
        message = json.loads(line[len(_MARK) :])
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


class LineSplitter:
    """A splitter of the bytes read from a pipe into lines."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add data and return the lines that are now complete, with their line ends."""
        *lines, self._partial = (self._partial + data).splitlines(keepends=True) or [b""]
        if self._partial.endswith(b"\n"):
            lines.append(self._partial)
            self._partial = b""
        return lines

    def flush(self) -> list[bytes]:
        """Return the last line if it has no line end; to be called at the end of the stream."""
        rest, self._partial = self._partial, b""
        return [rest] if rest else []


class SshProcess(ChildProcess):
    """A program on a host, through the ssh process that has started it.

    ssh never prompts. If it had to, it fails.

    Args:
        target: The destination for ssh, for example `user@node-a`.
        ssh: The ssh program and its options.
        command: The program on the host and its arguments.

    Attributes:
        descriptors: The descriptors to read from: the program's stdout, and the stderr of ssh and
            of the program.

    Raises:
        OSError: The ssh program cannot be run.
    """

    def __init__(self, target: str, ssh: Sequence[str], command: Sequence[str]) -> None:
        super().__init__(
            [*ssh, *_OPTIONS, "--", target, shlex.join(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        # Typed as Any: never None, because all three are pipes.
        self._pipes: list[Any] = [self.stdin, self.stdout, self.stderr]
        self.descriptors: tuple[int, int] = self._pipes[1].fileno(), self._pipes[2].fileno()
        self._splitters = {descriptor: LineSplitter() for descriptor in self.descriptors}

    def read_lines(self, descriptor: int) -> list[bytes] | None:
        """Read from a descriptor; return the lines that are now complete, with their line ends.

        Blocks until there is data. Returns None at the end of the stream.
        """
        splitter = self._splitters[descriptor]
        data = os.read(descriptor, 1 << 16)
        lines = splitter.feed(data) if data else splitter.flush()
        return lines if data or lines else None

    def write(self, data: bytes) -> None:
        """Send data to the program's stdin.

        Ignores a broken pipe: `read_lines` detects a lost connection.
        """
        with contextlib.suppress(BrokenPipeError):
            self._pipes[0].write(data)
            self._pipes[0].flush()

    def close(self, timeout: float) -> None:
        """Close the program's stdin and reap ssh; kill it if it runs for `timeout` seconds more."""
        stdin, stdout, stderr = self._pipes
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        self.end(timeout)
        stdout.close()
        stderr.close()


def resolve_address(target: str, ssh: Sequence[str]) -> str:
    """Return the address of a host according to ssh's configuration, which may define aliases.

    Runs `ssh -G`, which opens no connection.

    Args:
        target: The destination for ssh, for example `user@node-a`.
        ssh: The ssh program and its options.

    Raises:
        LaunchError: The command did not finish within `CONFIGURATION_TIMEOUT` seconds.
    """
    command = [*ssh, "-G", "--", target]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=CONFIGURATION_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        # This imports torch, and the launcher of a host sets torch's log level before.
        from phalanx.errors import LaunchError

        raise LaunchError(
            f"`{shlex.join(command)}` did not end within {CONFIGURATION_TIMEOUT} s: check for "
            "commands in ssh's configuration (Match exec), and for files that can't be read"
        ) from None
    for line in result.stdout.splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname":
            return value
    return target.rpartition("@")[2]
