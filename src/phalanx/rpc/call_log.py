"""A log of a worker's long-running calls, in the directory of its job.

The file `812.calls`, next to the flight recorder file of process 812, is replaced as a whole when
something has changed. It is removed when the worker leaves, unless an exception ends the process or
`shutdown`:

    {"version": 1, "id": 0, "name": "master",
     "made": [{"call": 7, "to": 1, "function": "slow", "since": 4711}],
     "executed": [{"call": 7, "of": 0, "since": 4711}]}

Times are monotonic, in nanoseconds. A call costs each side an insertion into a dict. A thread looks
at the dicts once a second. It writes the calls that were made more than a second ago, and all calls
that are being executed.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from phalanx.recorder.flight_recorder import get_job_directory
from phalanx.recorder.job_directory import CALL_LOG_VERSION, JobDirectory
from phalanx.rpc.peer import Peers
from phalanx.rpc.workers import WorkerInfo

_WRITE_SECONDS = 1.0
_log = logging.getLogger("phalanx")


class CallLog:
    """The calls of a worker, from `init_rpc` to `shutdown`, and the thread that writes its file.

    Attributes:
        outgoing: Calls whose answer a thread waits for, by number: callee, description and start in
            monotonic seconds. Calls with a future are in `Peer.pending`.
        incoming: The start of each call that this worker executes, in monotonic seconds, by the
            caller's id and the number of the call.
    """

    def __init__(self) -> None:
        self.outgoing: dict[int, tuple[int, str, float]] = {}
        self.incoming: dict[tuple[int, int], float] = {}
        self._peers = Peers()
        self._directory: JobDirectory | None = None
        self._file = f"{os.getpid()}.calls"
        self._written: dict[str, Any] = {}
        self._stopped = threading.Event()

    def start(self, own: WorkerInfo, peers: Peers) -> None:
        """Start to write the file, if this process has a directory of its job."""
        self._own, self._peers, self._directory = own, peers, get_job_directory()
        if self._directory is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._directory,), name="phalanx-call-log", daemon=True
            )
            self._thread.start()

    def keep(self) -> None:
        """Keep the file as it is, for diagnosis after this process has ended."""
        self._stopped.set()
        self._directory = None

    def close(self) -> None:
        """Remove the file unless `keep` was called; a second call does nothing."""
        self._stopped.set()
        directory, self._directory = self._directory, None
        if directory is not None:
            self._thread.join()
            if directory is not get_job_directory():
                return  # the process is ending and has already left its job
            try:
                os.unlink(self._file, dir_fd=directory.fd)
            except FileNotFoundError:
                pass  # it could not be written, and that was logged
            except OSError as error:
                _log.warning("phalanx: %s cannot be removed: %s", self._file, error)

    def _run(self, directory: JobDirectory) -> None:
        try:
            self._write(directory)
            while not self._stopped.wait(_WRITE_SECONDS) and directory is get_job_directory():
                self._write(directory)
        except OSError as error:
            _log.warning(
                "phalanx: `phalanx explain` and `phalanx watch` cannot show the calls of worker "
                "%r; the job continues: %s",
                self._own.name,
                error,
            )

    def _write(self, directory: JobDirectory) -> None:
        latest = time.monotonic() - _WRITE_SECONDS
        content = {
            "version": CALL_LOG_VERSION,
            "id": self._own.id,
            "name": self._own.name,
            "made": [
                {"call": call, "to": to, "function": function, "since": int(since * 1e9)}
                for call, to, function, since in self._unanswered()
                if since < latest
            ],
            "executed": [
                {"call": call, "of": caller, "since": int(since * 1e9)}
                for (caller, call), since in self.incoming.copy().items()
            ],
        }
        if content != self._written:
            self._written = content
            directory.replace(self._file, json.dumps(content).encode())

    def _unanswered(self) -> Iterator[tuple[int, int, str, float]]:
        """Yield number, callee, function and start of each call without an answer."""
        outgoing = list(self.outgoing.copy().items())
        for peer in self._peers:
            pending = peer.pending.copy().items()
            outgoing += [(call, (peer.id, each.description, each.since)) for call, each in pending]
        for call, (to, description, since) in outgoing:
            yield call, to, description.removesuffix(f" on {self._peers[to]}"), since
