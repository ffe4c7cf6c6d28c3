"""The launcher's log of its ranks: when each started, and how and when it ended.

It has one JSON object per line, in `launcher.jsonl` in the job's directory:

    {"event": "start", "rank": 0, "pid": 812, "attempt": 0, "world_size": 2, "time": 1795251664.1}
    {"event": "suspended", "rank": 0, "pid": 812, "time": 1795251702.8}
    {"event": "end", "rank": 0, "pid": 812, "code": -9, "stopped": false, "error": "",
     "time": 1795251702.9}
    {"event": "finish", "code": 137, "time": 1795251703.0}
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from phalanx import env
from phalanx.recorder.job_directory import (
    LAUNCHER_LOG_FILE,
    JobDirectory,
    make_job_name,
    prune,
)
from phalanx.system.processes import ExitCode, is_suspended
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_log = logging.getLogger("phalanx")


class LauncherLogWriter:
    """The launcher's log of a job, in the job's directory; a context manager that finishes it.

    If the directory cannot be created, the job continues without it after one warning.

    Attributes:
        name: The name of the job; `env.NO_JOB` if it has no directory.
    """

    def __init__(self, world_size: int, *, hosts: int = 1, keep: bool = False) -> None:
        """Create the job's directory, and remove the oldest jobs beyond the limit.

        Args:
            world_size: The number of ranks of the job, on all hosts.
            hosts: The number of hosts; the directory is for the ranks of this one.
            keep: Whether to keep the directory after a clean end too.

        Raises:
            UsageError: An environment variable is malformed.
        """
        self.name = env.NO_JOB
        self._directory: JobDirectory | None = None
        self._fd = -1
        self._started = False
        self._keep = keep
        self._world_size = world_size
        try:
            base, kept, given = env.jobs_directory(), env.jobs_kept(), env.job()
        except ValueError as error:
            raise UsageError(str(error)) from None
        if given != env.NO_JOB:
            try:
                self._begin(base, kept, hosts)
            except OSError as error:
                _log.warning(
                    "phalanx: `phalanx watch` and `phalanx explain` cannot read this job; the job "
                    "continues: %s",
                    error,
                )
                self._close(remove=True)

    def _begin(self, base: str, kept: tuple[int, int], hosts: int) -> None:
        self._directory = job = JobDirectory(base, make_job_name(), create=True)
        job.lock_shared()
        prune(base, kept)
        job.write_description(self._world_size, launcher=os.getpid(), hosts=hosts)
        self._fd = job.create(LAUNCHER_LOG_FILE, os.O_APPEND)
        self.name = job.name

    def __enter__(self) -> LauncherLogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        failure = ExitCode.INTERRUPTED if is_interrupt else ExitCode.FAILURE
        self.finish(ExitCode.SUCCESS if kind is None else failure)

    def environment(self) -> dict[str, str]:
        """Return the environment variables to set for the ranks."""
        if self._directory is None:
            return {"PHALANX_JOB": env.NO_JOB}
        return {"PHALANX_JOB": self.name, "PHALANX_JOBS_DIR": self._directory.base}

    def start(self, rank: int, pid: int, attempt: int = 0, world_size: int | None = None) -> None:
        """Record that a rank has been started.

        Args:
            rank: The number of the rank in the job.
            pid: The pid of its process.
            attempt: The number of times that all ranks have been restarted, from 0.
            world_size: The number of ranks of this attempt, if not the initial one.
        """
        self._started = True
        size = self._world_size if world_size is None else world_size
        self._write("start", rank=rank, pid=pid, attempt=attempt, world_size=size)

    def note_suspended(self, ranks: Iterable[tuple[int, int]]) -> None:
        """Record which ranks a signal such as SIGSTOP had stopped when the launcher ends all.

        Args:
            ranks: The number of each rank that the launcher started, and the pid of its process.
        """
        for rank, pid in ranks:
            if is_suspended(pid):
                self._write("suspended", rank=rank, pid=pid)

    def end(self, rank: int, pid: int, code: int | None, *, stopped: bool, error: str = "") -> None:
        """Record that a rank has ended; it may be recorded again once more is known.

        Args:
            rank: The number of the rank in the job.
            pid: The pid of its process.
            code: The exit code as in `subprocess`; None if unknown.
            stopped: Whether the launcher had begun to stop the rank before.
            error: The exception that ended it, in one line; empty if it is unknown.
        """
        self._write("end", rank=rank, pid=pid, code=code, stopped=stopped, error=error)

    def finish(self, code: int) -> bool:
        """Record that the job has ended with an exit code; a second call does nothing.

        The directory is removed after a clean end, unless it was to be kept, or if no rank had been
        started. Otherwise it is kept for `phalanx explain`.

        Returns:
            Whether the directory was kept and contains records to explain: flight recorders, or
            those of PyTorch. Ranks that never formed a group leave none.
        """
        if self._directory is None:
            return False
        self._write("finish", code=code)
        keep = (code != 0 or self._keep) and self._started
        records = self._directory.list_recorders() or self._directory.list_torch_records()
        self._close(remove=not keep)
        return keep and bool(records)

    def _write(self, event: str, **fields: Any) -> None:
        if self._fd == -1:
            return
        line = json.dumps({"event": event, **fields, "time": time.time()}) + "\n"
        try:
            os.write(self._fd, line.encode())
        except OSError as error:
            _log.warning(
                "phalanx: the starts and ends of ranks cannot be logged for job %s (%s); the job "
                "continues",
                self.name,
                error.strerror,
            )
            os.close(self._fd)
            self._fd = -1

    def _close(self, *, remove: bool) -> None:
        if self._fd != -1:
            os.close(self._fd)
        job, self._fd, self._directory = self._directory, -1, None
        if job is not None:
            (job.discard if remove else job.close)()
