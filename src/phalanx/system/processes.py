"""Child processes, process groups, pidfds of the processes of a job, exit codes and signals.

A process that must die with its parent calls `launcher.rank_bootstrap.die_with_parent`, which is
also a program of its own and therefore imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group, if any process of it is left.

    Args:
        pid: The pid of the leader. It must not have been reaped, since another process may get the
            same pid then.
        number: The signal.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


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
