"""What a launcher notes of its ranks: when each started, and how and when it ended.

One JSON object per line in `launcher.jsonl`, in the job's directory:

    {"event": "start", "rank": 0, "pid": 812, "attempt": 0, "world_size": 2, "time": 1795251664.1}
    {"event": "end", "rank": 0, "pid": 812, "code": -9, "stopped": false, "time": 1795251702.9}
    {"event": "finish", "code": 137, "time": 1795251703.0}
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from phalanx import env
from phalanx.errors import UsageError
from phalanx.observe.directory import NOTES, Directory, description, new_name, prune

__all__ = ["Notes"]

_log = logging.getLogger("phalanx")


class Notes:
    """A job's directory in the hands of its launcher: a context manager that finishes it.

    Where there can be none the job goes on without, after one warning.

    Attributes:
        name: of the job; `env.NO_JOB` if it has no directory.
    """

    def __init__(self, world_size: int, *, hosts: int = 1) -> None:
        """Make the job's directory, and remove old jobs beyond the bound.

        Args:
            world_size: how many ranks the job has, on all hosts.
            hosts: how many hosts; the directory is for the ranks of this one.

        Raises:
            UsageError: a malformed environment variable.
        """
        self.name = env.NO_JOB
        self._directory: Directory | None = None
        self._fd = -1
        self._started = False
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
                    "phalanx: this job can't be looked at by `phalanx watch` and `phalanx "
                    "explain`, it goes on without: %s",
                    error,
                )
                self._let_go(remove=True)

    def _begin(self, base: str, kept: tuple[int, int], hosts: int) -> None:
        self._directory = job = Directory(base, new_name(), create=True)
        job.hold()
        prune(base, kept)
        more = {"launcher": os.getpid(), "hosts": hosts}
        job.describe(description(job.name, self._world_size, **more))
        self._fd = job.create(NOTES, os.O_APPEND)
        self.name = job.name

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(0 if kind is None else 130 if issubclass(kind, KeyboardInterrupt) else 1)

    def environment(self) -> dict[str, str]:
        """What the ranks must find in their environment."""
        if self._directory is None:
            return {"PHALANX_JOB": env.NO_JOB}
        return {"PHALANX_JOB": self.name, "PHALANX_JOBS_DIR": self._directory.base}

    def start(self, rank: int, pid: int, attempt: int = 0, world_size: int | None = None) -> None:
        """Note that a rank has been started.

        Args:
            rank: its number in the job.
            pid: its process.
            attempt: which start of all ranks this is, from 0.
            world_size: how many ranks this attempt has, if not as many as the job began with.
        """
        self._started = True
        size = self._world_size if world_size is None else world_size
        self._write("start", rank=rank, pid=pid, attempt=attempt, world_size=size)

    def end(self, rank: int, pid: int, code: int | None, *, stopped: bool) -> None:
        """Note that a rank has ended.

        Args:
            rank: its number in the job.
            pid: its process.
            code: as in `subprocess`; None if it isn't known.
            stopped: the launcher had begun to stop it before.
        """
        self._write("end", rank=rank, pid=pid, code=code, stopped=stopped)

    def finish(self, code: int) -> bool:
        """Note that the job has ended with an exit code; a second call does nothing.

        Its directory is removed after a clean end, or when no rank had been started; else it is
        kept for `phalanx explain`.

        Returns:
            Whether there is something to explain: it was kept, with black boxes in it. Ranks that
            never formed a group leave none.
        """
        if self._directory is None:
            return False
        self._write("finish", code=code)
        keep = code != 0 and self._started
        boxes = bool(self._directory.boxes())
        self._let_go(remove=not keep)
        return keep and boxes

    def _write(self, event: str, **fields: Any) -> None:
        if self._fd == -1:
            return
        line = json.dumps({"event": event, **fields, "time": time.time()}) + "\n"
        try:
            os.write(self._fd, line.encode())
        except OSError as error:
            _log.warning(
                "phalanx: can't note in %s how ranks start and end (%s); the job goes on",
                self.name,
                error.strerror,
            )
            os.close(self._fd)
            self._fd = -1

    def _let_go(self, *, remove: bool) -> None:
        if self._fd != -1:
            os.close(self._fd)
        job, self._fd, self._directory = self._directory, -1, None
        if job is not None and remove:
            try:
                job.remove()
            except OSError as error:
                _log.warning("phalanx: %s", error)
        elif job is not None:
            job.close()
