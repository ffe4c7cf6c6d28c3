"""The processes of one `phalanx.launch`: start them, watch them, stop them, leave none."""

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

from phalanx.launch.failure import GRACE, Failure, excerpt, first_cause
from phalanx.launch.relay import Exit, Relay, Sink
from phalanx.launch.worker import Outcome
from phalanx.observe.notes import Notes

__all__ = ["STOP_TIMEOUT", "Ranks"]

STOP_TIMEOUT = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped."""

_TICK = 0.1
# The caller's sys.path is taken before anything is imported: what lies in the working directory
# doesn't shadow the standard library, and phalanx is found where the caller found it.
_WORKER = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from phalanx.launch.worker import main; main()"
)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    result: int
    """A memory file: it takes a result of any size, and nobody has to read while it is written."""


class Ranks:
    """A context manager; when it is left, every rank has ended and has been reaped.

    Attributes, set then:
        outcomes: by rank, what it handed back; None if it ended before it did.
        failures: how ranks failed, those that were stopped among them.
        stopped: the ranks that were still running when the others were stopped.
    """

    outcomes: list[Outcome | None]
    failures: list[Failure]
    stopped: list[int]

    def __init__(self, payload: int, notes: Notes, *, prefix: bool) -> None:
        """Take over `payload`, the descriptor of the memory file with the pickled call."""
        self._payload = payload
        self._notes = notes
        self._prefix = prefix
        self._ranks: list[_Rank] = []
        self._relay = Relay()
        self._relay.on_exit = self._note_end
        self._sinks = Sink("stdout"), Sink("stderr")
        self._stop_time = float("inf")

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._stop(signal.SIGTERM, STOP_TIMEOUT)
        finally:  # also when a second Ctrl-C cuts the wait short
            self._stop(signal.SIGKILL, STOP_TIMEOUT)
            self._record()
            self._reap()

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the next rank.

        Raises:
            OSError: the process can't be made.
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
                # Ctrl-C reaches the caller only, which stops the ranks and what they started.
                start_new_session=True,
            )
        except OSError:
            os.close(result)
            raise
        self._ranks.append(_Rank(process, result))
        self._notes.start(rank, process.pid)
        self._relay.add_process(rank, process.pid)
        prefix = f"[rank {rank}] " if self._prefix else ""
        out, err = self._sinks
        self._relay.add_stream(rank, _take(process.stdout), out, prefix, keep=False)
        self._relay.add_stream(rank, _take(process.stderr), err, prefix, keep=True)

    def wait(self, deadline: float | None) -> bool:
        """Wait until all ranks have ended or one has failed; False if the deadline came first.

        After a failure that only follows from another, waits `GRACE` seconds more for its cause.
        """
        while len(self._relay.exits()) < len(self._ranks):
            now = time.monotonic()
            if failures := self._failures():
                cause = first_cause(failures)
                if cause.distance == 0 or now > cause.time + GRACE:
                    return True
            if deadline is not None and now >= deadline:
                return False
            self._relay.step(_TICK if deadline is None else min(_TICK, deadline - now))
        return True

    def _command(self, result: int) -> list[str]:
        path = "\n".join(entry or os.getcwd() for entry in sys.path)
        ours = [str(number) for number in (os.getpid(), self._payload, result)]
        return [sys.executable, "-c", _WORKER, *ours, path]

    def _record(self) -> None:
        exits = self._relay.exits()
        self.outcomes = [self._outcome(rank) for rank in range(len(self._ranks))]
        self.failures = self._failures()
        failed = [failure.rank for failure in self.failures if not failure.stopped]
        self.stopped = [
            rank
            for rank in range(len(self._ranks))
            if rank not in failed and (rank not in exits or exits[rank].time > self._stop_time)
        ]

    def _note_end(self, rank: int, end: Exit) -> None:
        pid = self._ranks[rank].process.pid
        self._notes.end(rank, pid, end.code, stopped=end.time > self._stop_time)

    def _outcome(self, rank: int) -> Outcome | None:
        with os.fdopen(self._ranks[rank].result, "rb", closefd=False) as file:
            file.seek(0)
            try:
                outcome: Outcome = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # it died before or while it wrote
                return None
            return outcome

    def _failures(self) -> list[Failure]:
        found = []
        for rank, end in self._relay.exits().items():
            outcome = self._outcome(rank)
            if end.code == 0 and outcome is not None:
                continue
            text, when = excerpt(self._relay.tail(rank)), end.time
            if outcome is not None and outcome.value is None:
                text, when = outcome.traceback, outcome.time
            pid = self._ranks[rank].process.pid
            late = when > self._stop_time
            found.append(Failure(rank, pid, end.code or 0, when, text, stopped=late))
        return found

    def _alive(self) -> list[int]:
        exits = self._relay.exits()
        return [rank for rank in range(len(self._ranks)) if rank not in exits]

    def _stop(self, number: signal.Signals, patience: float) -> None:
        now = time.monotonic()
        if self._alive():
            self._stop_time = min(self._stop_time, now)
        for rank in self._alive():
            self._signal(rank, number)
        while self._alive() and time.monotonic() < now + patience:
            self._relay.step(_TICK)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        # The rank hasn't been reaped, so its number can't belong to another process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._ranks[rank].process.pid, number)

    def _reap(self) -> None:
        for rank, entry in enumerate(self._ranks):
            self._signal(rank, signal.SIGKILL)  # what the rank started and left behind
            if rank in self._relay.exits():
                entry.process.wait()
        self._relay.close()
        for entry in self._ranks:
            os.close(entry.result)
        os.close(self._payload)


def _take(pipe: IO[bytes] | None) -> int:
    """The descriptor of a pipe, no longer the file object's."""
    if pipe is None:
        raise ValueError("the process was started without this pipe")
    with pipe:
        return os.dup(pipe.fileno())
