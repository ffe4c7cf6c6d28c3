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

from phalanx.launch.failure import GRACE, Failure, excerpt, first_cause
from phalanx.launch.relay import Relay, Sink
from phalanx.launch.worker import Outcome

__all__ = ["STOP_TIMEOUT", "Ranks"]

STOP_TIMEOUT = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped."""

_TICK = 0.1
# The caller's sys.path is taken before anything is imported: what lies in the working directory
# doesn't shadow the standard library, and phalanx is found where the caller found it.
_WORKER = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\0'.join(':')); "
    "from phalanx.launch.worker import main; main()"
)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    result: int
    """A memory file: it takes a result of any size, and nobody has to read while it is written."""


class Ranks:
    """A context manager; when it is left, every rank has ended and has been reaped."""

    def __init__(self, payload: int, *, prefix: bool) -> None:
        """Take over `payload`, the descriptor of the memory file with the pickled call."""
        self._payload = payload
        self._prefix = prefix
        self._ranks: list[_Rank] = []
        self._relay = Relay()
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
        self._relay.add_process(rank, process.pid)
        prefix = f"[rank {rank}] " if self._prefix else ""
        for pipe, sink in zip((process.stdout, process.stderr), self._sinks, strict=True):
            assert pipe is not None
            self._relay.add_stream(
                rank, os.dup(pipe.fileno()), sink, prefix, keep=pipe is process.stderr
            )
            pipe.close()

    def wait(self, deadline: float | None) -> bool:
        """Wait until all ranks have ended or one has failed; False if the deadline came first.

        After a failure that only follows from another, waits `GRACE` seconds more for its cause.
        """
        while len(self._relay.exits()) < len(self._ranks):
            now = time.monotonic()
            if failures := self.failures():
                cause = first_cause(failures)
                if cause.distance == 0 or now > cause.time + GRACE:
                    return True
            if deadline is not None and now >= deadline:
                return False
            self._relay.step(_TICK if deadline is None else min(_TICK, deadline - now))
        return True

    def running(self) -> list[int]:
        """The ranks that haven't ended by themselves, before they were stopped."""
        exits = self._relay.exits()
        return [
            rank
            for rank in range(len(self._ranks))
            if rank not in exits or exits[rank].time > self._stop_time
        ]

    def outcome(self, rank: int) -> Outcome | None:
        """What a rank handed back; None if it ended before it did."""
        with os.fdopen(self._ranks[rank].result, "rb", closefd=False) as file:
            file.seek(0)
            try:
                outcome: Outcome = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # it died before or while it wrote
                return None
            return outcome

    def failures(self) -> list[Failure]:
        """How ranks have failed so far."""
        found = []
        for rank, exit in self._relay.exits().items():
            outcome = self.outcome(rank)
            if exit.code == 0 and outcome is not None:
                continue
            text, when = excerpt(self._relay.tail(rank)), exit.time
            if outcome is not None and outcome.value is None:
                text, when = outcome.traceback, outcome.time
            found.append(
                Failure(
                    rank,
                    self._ranks[rank].process.pid,
                    exit.code or 0,
                    when,
                    text,
                    stopped=when > self._stop_time,
                )
            )
        return found
