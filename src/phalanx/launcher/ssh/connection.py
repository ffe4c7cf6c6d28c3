"""The ssh connection to one host and the launcher on it."""

import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.ssh.plan import HostSpec
from phalanx.system.ssh import SshProcess, pack_message, unpack_message

_KEPT_LINES = 40
_SSH_FAILED = 255
_NO_PROGRAM = (126, 127)


class Connection:
    """A connection to the launcher on one host.

    Attributes:
        host: The host.
        process: The ssh process that has started the launcher.
        descriptors: The descriptors to read from: the messages, and the stderr of ssh and the host.
        hello: The host's `hello` message, with its versions; None until it arrives.
        end: The host's `end` message, with the outcome of its ranks; None until it arrives.
        end_time: The monotonic time in seconds at which `end` arrived or the connection was found
            broken; 0 until then.
        started: True once the host has been told to start its ranks.
        stopped: True once the host has been told to stop its ranks.
    """

    def __init__(self, host: HostSpec, ssh: Sequence[str], python: str) -> None:
        """Start ssh without waiting for it.

        Raises:
            UsageError: The ssh program cannot be run.
        """
        self.host = host
        self.hello: dict[str, Any] | None = None
        self.end: dict[str, Any] | None = None
        self.end_time = 0.0
        self.started = self.stopped = False
        self._python = python
        self._text_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        command = [python, "-m", "phalanx.cli.remote_launcher"]
        try:
            self.process = SshProcess(host.target, ssh, command)
        except OSError as error:
            raise UsageError(
                f"can't run {ssh[0]!r}: {error.strerror}; --hosts needs OpenSSH's client: install "
                "it, or name another program with --ssh"
            ) from None
        self.descriptors = self.process.descriptors

    def read(self, descriptor: int) -> Iterator[dict[str, Any]] | None:
        """Read from a descriptor and return its complete messages; None at the end of the stream.

        Blocks until there is data. A line that is not a message is returned as a message of kind
        `text`, with its text as `line`.
        """
        lines = self.process.read_lines(descriptor)
        if lines is None:
            return None
        return self._messages(lines, from_launcher=descriptor == self.descriptors[0])

    def _messages(self, lines: list[bytes], *, from_launcher: bool) -> Iterator[dict[str, Any]]:
        for line in lines:
            # An empty line precedes each message.
            if not line.strip() and (from_launcher or self.hello is None):
                continue
            message = unpack_message(line) if from_launcher else None
            if message is None:
                text = line.decode(errors="replace").rstrip()
                self._text_lines.append(text)
                message = {"kind": "text", "line": text}
            elif message["kind"] == "hello":
                self.hello = message
            elif message["kind"] == "end":
                self.end, self.end_time = message, time.monotonic()
            yield message

    def send(self, kind: str = "", **content: Any) -> None:
        """Send a message, or a heartbeat if `kind` is empty.

        Ignores a broken pipe: `read` detects a lost connection.
        """
        self.process.write(pack_message(kind=kind, **content) if kind else b"\n")

    def start(self, **content: Any) -> None:
        """Tell the host to start its ranks."""
        self.started = True
        self.send("start", **content)

    def stop(self, number: int) -> None:
        """Tell the host to stop its ranks as if it had received the signal `number`."""
        self.stopped = True
        self.send("stop", signal=number)

    def close(self, timeout: float) -> None:
        """Close the connection and end ssh; the host then ends the processes that it started.

        Args:
            timeout: Seconds to wait for ssh to exit before it is killed.
        """
        self.process.close(timeout)

    def connection_error(self) -> LaunchError:
        """Return an error that describes why the connection was lost and suggests a fix.

        Must be called after ssh has exited. The error includes the last line that ssh or the host
        has printed.
        """
        code = self.process.returncode
        last = next((line for line in reversed(self._text_lines) if line.strip()), "")
        name = self.host.name
        if self.hello is None:
            message = _suggest_fix(self.host, self._python, code, "\n".join(self._text_lines))
        elif code in (_SSH_FAILED, -signal.SIGKILL):
            message = f"lost the launcher on {name}, or the connection to it"
        else:
            message = f"the launcher on {name} ended with code {code} before its ranks did"
        source = "ssh" if code == _SSH_FAILED else "the host"
        return LaunchError(f"{message} (last output of {source}: {last})" if last else message)


def _suggest_fix(host: HostSpec, python: str, code: int, text: str) -> str:
    """Suggest a fix for a launcher that could not be started, based on the output of ssh."""
    name, target = host.name, host.target
    by_hand = f"`ssh -o BatchMode=yes {target} true` must work"
    if "Host key verification failed" in text:
        return (
            f"ssh does not know the host key of {name}: connect once by hand, `ssh {target}`, and "
            "compare the fingerprint"
        )
    if "Permission denied" in text and code == _SSH_FAILED:
        return (
            f"ssh to {name} requires a password: install your key with `ssh-copy-id {target}`, or "
            f"unlock one with `ssh-add`; {by_hand}"
        )
    if code == _SSH_FAILED:
        return f"can't reach {name} by ssh: {by_hand}"
    if "No module named" in text and "phalanx" in text:
        return (
            f"{python} on {name} lacks Phalanx, or has a version without --hosts: install the "
            "version of this machine there, or name another Python with --remote-python"
        )
    if code in _NO_PROGRAM:
        return (
            f"{name} can't run {python}: install Python and Phalanx there at the same path, or "
            "name its Python with --remote-python"
        )
    return f"Phalanx did not start on {name}: exit code {code}"
