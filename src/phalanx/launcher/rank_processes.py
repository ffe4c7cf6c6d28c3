"""The processes of one call of `phalanx.launch`: start, watch and stop them, and leave none."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from phalanx.launcher.output_forwarder import Exit, OutputForwarder, Sink
from phalanx.launcher.root_cause import GRACE, Failure, excerpt, find_root_cause
from phalanx.launcher.worker import RankOutcome
from phalanx.observe.launcher_log_writer import LauncherLogWriter

__all__ = ["STOP_TIMEOUT", "RankProcesses"]

STOP_TIMEOUT = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped."""

_POLL_SECONDS = 0.1
# The worker takes over the caller's sys.path before it imports anything else. Files in the working
# directory therefore do not shadow the standard library, and phalanx is found as in the caller.
_WORKER = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from phalanx.launcher.worker import main; main()"
)


@dataclass
class _RankProcess:
    process: subprocess.Popen[bytes]
    result: int
    """A memory file: it holds a result of any size, and the writer needs no concurrent reader."""


class RankProcesses:
    """A context manager for the ranks; on exit, every rank has ended and has been reaped.

    Attributes:
        outcomes: The outcome of each rank, by rank; None if the rank ended without one. Set on
            exit.
        failures: The failures of ranks, including those of stopped ranks. Set on exit.
        stopped: The ranks that were still running when the ranks were stopped. Set on exit.
    """

    outcomes: list[RankOutcome | None]
    failures: list[Failure]
    stopped: list[int]

    def __init__(self, payload: int, launcher_log: LauncherLogWriter, *, prefix: bool) -> None:
        """Take over the memory file with the pickled call; `start` starts the ranks.

        Args:
            payload: The descriptor of the memory file with the pickled call; closed on exit.
            launcher_log: The job's record of rank starts and exits.
            prefix: True to begin every line of output with the rank.
        """
        self._payload = payload
        self._launcher_log = launcher_log
        self._prefix = prefix
        self._ranks: list[_RankProcess] = []
        self._forwarder = OutputForwarder()
        self._forwarder.on_exit = self._record_exit
        self._sinks = Sink("stdout"), Sink("stderr")
        self._stop_time = float("inf")

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._stop(signal.SIGTERM, STOP_TIMEOUT)
        finally:  # even if a second Ctrl-C interrupts the wait
            self._stop(signal.SIGKILL, STOP_TIMEOUT)
            self._collect_results()
            self._reap()

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the next rank.

        Raises:
            OSError: The process cannot be created.
        """
        rank = len(self._ranks)
        result = os.memfd_create(f"phalanx-result-{rank}", os.MFD_CLOEXEC)
        try:
            process = subprocess.Popen(
                self._command(result),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(self._payload, result),
                # Ctrl-C must reach only the caller, which stops the ranks and their children.
                start_new_session=True,
            )
        except OSError:
            os.close(result)
            raise
        self._ranks.append(_RankProcess(process, result))
        self._launcher_log.start(rank, process.pid)
        self._forwarder.add_process(rank, process.pid)
        prefix = f"[rank {rank}] " if self._prefix else ""
        out, err = self._sinks
        self._forwarder.add_stream(rank, _detach_pipe(process.stdout), out, prefix, keep=False)
        self._forwarder.add_stream(rank, _detach_pipe(process.stderr), err, prefix, keep=True)

    def wait(self, deadline: float | None) -> bool:
        """Wait until all ranks have ended or one has failed.

        After a failure that is a consequence of another one, waits `GRACE` more seconds for the
        cause.

        Args:
            deadline: The monotonic time in seconds at which to give up; None for no limit.

        Returns:
            False if the deadline came first.
        """
        while len(self._forwarder.exits()) < len(self._ranks):
            now = time.monotonic()
            if failures := self._failures():
                cause = find_root_cause(failures)
                if cause.distance == 0 or now > cause.time + GRACE:
                    return True
            if deadline is not None and now >= deadline:
                return False
            self._forwarder.step(
                _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - now)
            )
        return True

    def _command(self, result: int) -> list[str]:
        path = "\n".join(entry or os.getcwd() for entry in sys.path)
        arguments = [str(number) for number in (os.getpid(), self._payload, result)]
        return [sys.executable, "-c", _WORKER, *arguments, path]

    def _collect_results(self) -> None:
        exits = self._forwarder.exits()
        self.outcomes = [self._outcome(rank) for rank in range(len(self._ranks))]
        self.failures = self._failures()
        failed = [failure.rank for failure in self.failures if not failure.stopped]
        self.stopped = [
            rank
            for rank in range(len(self._ranks))
            if rank not in failed and (rank not in exits or exits[rank].time > self._stop_time)
        ]

    def _record_exit(self, rank: int, end: Exit) -> None:
        pid = self._ranks[rank].process.pid
        self._launcher_log.end(rank, pid, end.code, stopped=end.time > self._stop_time)

    def _outcome(self, rank: int) -> RankOutcome | None:
        with os.fdopen(self._ranks[rank].result, "rb", closefd=False) as file:
            file.seek(0)
            try:
                outcome: RankOutcome = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the rank died before or during the write
                return None
            return outcome

    def _failures(self) -> list[Failure]:
        failures = []
        for rank, end in self._forwarder.exits().items():
            outcome = self._outcome(rank)
            if end.code == 0 and outcome is not None:
                continue
            text, failed_at = excerpt(self._forwarder.tail(rank)), end.time
            if outcome is not None and outcome.value is None:
                text, failed_at = outcome.traceback, outcome.time
            pid = self._ranks[rank].process.pid
            was_stopped = failed_at > self._stop_time
            failures.append(Failure(rank, pid, end.code or 0, failed_at, text, stopped=was_stopped))
        return failures

    def _alive(self) -> list[int]:
        exits = self._forwarder.exits()
        return [rank for rank in range(len(self._ranks)) if rank not in exits]

    def _stop(self, number: signal.Signals, timeout: float) -> None:
        now = time.monotonic()
        if self._alive():
            self._stop_time = min(self._stop_time, now)
        for rank in self._alive():
            self._signal(rank, number)
        while self._alive() and time.monotonic() < now + timeout:
            self._forwarder.step(_POLL_SECONDS)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        # The rank has not been reaped, so its pid cannot belong to another process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._ranks[rank].process.pid, number)

    def _reap(self) -> None:
        for rank, entry in enumerate(self._ranks):
            self._signal(rank, signal.SIGKILL)  # processes that the rank has left behind
            if rank in self._forwarder.exits():
                entry.process.wait()
        self._forwarder.close()
        for entry in self._ranks:
            os.close(entry.result)
        os.close(self._payload)


def _detach_pipe(pipe: IO[bytes] | None) -> int:
    """Return a descriptor of a pipe that does not belong to the file object, which is closed."""
    if pipe is None:
        raise ValueError("the process was started without this pipe")
    with pipe:
        return os.dup(pipe.fileno())
