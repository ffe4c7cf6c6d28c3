"""Child processes, process groups, pidfds, identities, states, exit codes and signals.

A process that must die with its parent calls `launcher.rank_bootstrap.die_with_parent`, which is
also a program of its own and therefore imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import math
import os
import select
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from phalanx.system.host_identity import host_identity
from phalanx.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PR_SET_CHILD_SUBREAPER = 36


class ChildProcess(subprocess.Popen[bytes]):
    """A child process that leads a session and a process group of its own.

    Ctrl-C at the terminal therefore reaches only this process, which ends its children itself.

    Args:
        command: The program and its arguments.
        options: Options of `subprocess.Popen`; without `stdin`, the child reads from /dev/null.

    Attributes:
        command: The program and its arguments.

    Raises:
        OSError: The process cannot be created.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.command = list(command)
        options.setdefault("stdin", subprocess.DEVNULL)
        super().__init__(command, start_new_session=True, **options)

    def end(self, timeout: float) -> None:
        """Reap the child; kill it if it does not exit by itself within `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)
        self.kill()
        self.wait()


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends.

    Raises:
        OSError: The kernel refused the request.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


class AdoptedProcess:
    """A child process that another process started; part of the interface of `subprocess.Popen`.

    Attributes:
        pid: The pid.
        returncode: The exit code, as in `subprocess.Popen`; None if it has not been reaped.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None if the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return the exit code.

        Raises:
            subprocess.TimeoutExpired: It runs after `timeout` seconds.
        """
        for _ in attempts(math.inf if timeout is None else time.monotonic() + timeout):
            if (code := self.poll()) is not None:
                return code
        raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)


class AdoptedHandler:
    """An adopted process, as PyTorch's agent handles it: a stand-in for its `SubprocessHandler`.

    Attributes:
        proc: The process, which leads a process group.
    """

    def __init__(self, pid: int) -> None:
        self.proc = AdoptedProcess(pid)

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the process group."""
        os.killpg(self.proc.pid, death_sig)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group, if any process of it is left.

    Args:
        pid: The pid of the leader. It must not have been reaped, since another process may get the
            same pid then.
        number: The signal.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def reap_group(pid: int, seconds: float) -> None:
    """Reap the children of this process in a process group that was killed; wait for them.

    Args:
        pid: The pid of the group's leader.
        seconds: The longest time to wait.
    """
    with contextlib.suppress(ChildProcessError):  # none is left
        for _ in attempts(time.monotonic() + seconds):
            os.waitpid(-pid, os.WNOHANG)


class RankPidfds:
    """The pidfds of ranks, which need not be children of this process.

    A pidfd never refers to another process that has got the same pid.
    """

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}

    def add(self, rank: int, pid: int) -> None:
        """Open the pidfd of a rank.

        Raises:
            OSError: The rank has been reaped, or this process may open no more files.
        """
        self._pidfds[rank] = os.pidfd_open(pid)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank.

        Raises:
            ProcessLookupError: The rank has been reaped.
        """
        signal.pidfd_send_signal(self._pidfds[rank], number)

    def signal_all(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to those ranks, or all, that have not been reaped."""
        for rank in self._pidfds if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                self.signal(rank, number)

    def wait(self, timeout: float, ranks: Iterable[int] | None = None) -> list[int]:
        """Wait until ranks have ended; return those that still run after `timeout` seconds.

        Args:
            timeout: Seconds to wait at most.
            ranks: The ranks; None for all.
        """
        deadline = time.monotonic() + timeout
        running = {rank: self._pidfds[rank] for rank in (self._pidfds if ranks is None else ranks)}
        poll = select.poll()
        for pidfd in running.values():
            poll.register(pidfd, select.POLLIN)
        while running:
            remaining = max(deadline - time.monotonic(), 0)
            ended = [pidfd for pidfd, _ in poll.poll(remaining * 1000)]
            for pidfd in ended:
                poll.unregister(pidfd)
            running = {rank: pidfd for rank, pidfd in running.items() if pidfd not in ended}
            if not remaining:
                break
        return list(running)

    def close(self) -> None:
        """Close all pidfds."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()


def read_stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on (`StatField`).

    Returns:
        None if the process does not exist, or is hidden from this user.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The field before is the program's name in parentheses, which may contain any character.
    return text[text.rindex(b")") + 2 :].split()


class StatField(enum.IntEnum):
    """The index of a field in the list of `read_stat`."""

    STATE = 0
    """A letter; Z and X are those of a process that has ended."""
    START = 19
    """The start of the process, in clock ticks since the start of the system."""
    RESIDENT_PAGES = 21


def is_suspended(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP, or a debugger, has stopped a process."""
    fields = read_stat(pid)
    return fields is not None and fields[StatField.STATE] in (b"T", b"t")


class ProcessIdentity(NamedTuple):
    """A process, as no other one is: pids are given again.

    Attributes:
        host: The host and its namespace of pids.
        pid: The pid.
        start: The start of the process, in clock ticks since the start of the system.
    """

    host: str
    pid: int
    start: int

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return the identity of this process."""
        return cls(host_identity("pid"), os.getpid(), _start(os.getpid()))

    def has_ended(self) -> bool | None:
        """Return whether the process has ended; None if it runs where this one cannot see it."""
        return None if self.host != host_identity("pid") else _start(self.pid) != self.start


def _start(pid: int) -> int:
    fields = read_stat(pid)
    if fields is None or fields[StatField.STATE] in (b"Z", b"X"):
        return -1
    return int(fields[StatField.START])


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGKILL` for 9; `signal 42` if 42 has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int) -> str:
    """Describe an exit code as in `subprocess`: "exited with code 3" or "was killed by SIGKILL"."""
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_exit_code(number: int) -> int:
    """Return the exit code for an end by a signal, by the convention of shells: 128 + number."""
    return 128 + number


class ExitCode:
    """The exit codes of commands and of ranks."""

    SUCCESS = 0
    FAILURE = 1
    USAGE = 2
    INTERRUPTED = signal_exit_code(signal.SIGINT)
    TERMINATED = signal_exit_code(signal.SIGTERM)

    MEANINGS: ClassVar = {
        str(SUCCESS): "success",
        str(FAILURE): "an error that the message describes, or a check that failed",
        str(USAGE): "wrong usage: an unknown option, a missing file",
        str(INTERRUPTED): "ended by Ctrl-C",
        str(TERMINATED): "ended by SIGTERM (`phalanx run`, a `Trainer`)",
        "128 + N": "the rank that failed first was killed by signal N (`phalanx run`)",
        "other": "the exit code of the rank that failed first (`phalanx run`)",
    }
    """The meaning of each exit code, in the order of the documentation; `phalanx --help` has it."""
