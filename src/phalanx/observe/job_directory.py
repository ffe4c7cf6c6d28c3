"""The private directory in which a job keeps its files, found by the job's name.

Each process of a job holds a shared lock on the directory as long as it is alive. The kernel
releases the lock when the process ends, for whatever reason. A directory that is not locked belongs
to a job that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
import weakref
from typing import Any, NamedTuple

from phalanx import env
from phalanx.observe.files import (
    FLAGS,
    UnusableFileError,
    get_reason,
    make_directory,
    open_directory,
    read_file,
)
from phalanx.system.host_identity import boot_id, namespace_id

__all__ = [
    "JOB_FILE",
    "LAUNCHER_LOG_FILE",
    "RECORDER_FILE",
    "RECORDER_SUFFIX",
    "VERSION",
    "DirectoryUsage",
    "JobDirectory",
    "UnusableFileError",
    "describe_job",
    "get_command_line",
    "get_pid_scope",
    "get_recorder_name",
    "list_job_names",
    "make_job_name",
    "prune",
]

VERSION = 1
"""The format version of `job.json` and `launcher.jsonl`; recorders have their own version."""
JOB_FILE = "job.json"
LAUNCHER_LOG_FILE = "launcher.jsonl"
RECORDER_SUFFIX = ".recorder"
RECORDER_FILE = re.compile(rf"([1-9][0-9]{{0,9}}){re.escape(RECORDER_SUFFIX)}", re.ASCII)
"""The file name of a flight recorder, which contains the pid of its process."""

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
# Processes that inspect or remove a directory hold it exclusively for a moment.
_LOCK_SECONDS = 2.0
_log = logging.getLogger("phalanx")
_open_directories: weakref.WeakSet[JobDirectory] = weakref.WeakSet()


class DirectoryUsage(NamedTuple):
    """The time of the last addition to a directory (Unix seconds), and its disk usage in bytes."""

    time: float
    size: int


def make_job_name() -> str:
    """Return a unique name for a job, composed of the time and a random suffix."""
    random = "".join(secrets.choice(_ALPHABET) for _ in range(6))
    return f"{time.strftime('%Y%m%d-%H%M')}-{random}"


def get_recorder_name(pid: int) -> str:
    """Return the file name of a process's flight recorder."""
    return f"{pid}{RECORDER_SUFFIX}"


def list_job_names(base: str) -> list[str]:
    """Return the names of all jobs in a directory, sorted; empty if the directory is missing.

    Raises:
        UnusableFileError: The directory is not private to this user.
    """
    try:
        fd = open_directory(base, base)
    except FileNotFoundError:
        return []
    try:
        return sorted(name for name in os.listdir(fd) if env.JOB_NAME.fullmatch(name))
    finally:
        os.close(fd)


class JobDirectory:
    """The open directory of one job; a context manager that closes it.

    Attributes:
        base: The path of the parent directory.
        name: The name of the job.
        path: The path of the directory, for messages only: all access is by descriptor.
        fd: The descriptor of the directory; -1 once closed, or in a forked child.
    """

    def __init__(self, base: str, name: str, *, create: bool = False) -> None:
        """Open the directory, or create it.

        Args:
            base: The parent directory, as returned by `env.jobs_directory`.
            name: The name of the job; the caller must have checked it against `env.JOB_NAME`.
            create: Whether to create the directory, and `base`, if they are missing.

        Raises:
            FileNotFoundError: The directory is missing and `create` is false.
            UnusableFileError: It cannot be created or opened, or is not private to this user.
        """
        self.base, self.name, self.path = base, name, os.path.join(base, name)
        if create:
            make_directory(base, base)
        self._base = open_directory(base, base)
        try:
            if create:
                make_directory(name, self.path, self._base)
            self.fd = open_directory(name, self.path, self._base)
        except OSError:
            os.close(self._base)
            raise
        _open_directories.add(self)

    def __enter__(self) -> JobDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory and release its lock; a second call does nothing."""
        if self.fd != -1:
            os.close(self.fd)
            os.close(self._base)
            self.fd = self._base = -1

    def lock_shared(self) -> None:
        """Take a shared lock, which shows that a process of the job is alive.

        The lock lasts until the directory is closed or the process ends. Waits at most two seconds
        for a process that inspects or removes the directory.

        Raises:
            UnusableFileError: The directory has been removed, or is being removed.
        """
        deadline = time.monotonic() + _LOCK_SECONDS
        while not (held := self._lock(fcntl.LOCK_SH)) and time.monotonic() < deadline:
            time.sleep(0.001)
        if not held or not self._is_linked():
            raise UnusableFileError(f"{self.path} has just been removed")

    def lock_exclusive(self) -> bool:
        """Take an exclusive lock if no other process of the job is alive; return whether it worked.

        On failure, a shared lock held before is released. On a file system without locks, every job
        appears to be alive, and none is removed.
        """
        return self._lock(fcntl.LOCK_EX)

    def has_ended(self) -> bool:
        """Return whether no process of the job is alive, without keeping a lock.

        Must not be called while holding a lock, which would be released.
        """
        ended = self.lock_exclusive()
        if ended:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        return ended

    def create(self, name: str, flags: int = 0) -> int:
        """Create a file that only this user can access, and return a descriptor for writing.

        Raises:
            OSError: The file already exists or cannot be created.
        """
        flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS
        return os.open(name, flags, 0o600, dir_fd=self.fd)

    def write_description(self, description: dict[str, Any]) -> None:
        """Write `job.json` atomically.

        Raises:
            OSError: The file cannot be written.
        """
        self.replace(JOB_FILE, json.dumps(description).encode())

    def replace(self, name: str, content: bytes) -> None:
        """Create or replace a file atomically: readers see all of the content or none of it.

        Raises:
            OSError: The file cannot be written.
        """
        part = f"{name}.{os.getpid()}"
        with os.fdopen(self.create(part), "wb") as file:
            file.write(content)
        os.rename(part, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file of at most `limit` bytes; raises like `files.read_file`."""
        return read_file(self.fd, name, limit)

    def list_recorders(self) -> dict[int, str]:
        """Return the names of the flight recorders by pid, sorted by pid."""
        found = filter(None, map(RECORDER_FILE.fullmatch, os.listdir(self.fd)))
        return dict(sorted((int(match[1]), match[0]) for match in found))

    def measure_usage(self) -> DirectoryUsage:
        """Return the time of the last addition to the directory, and its disk usage."""
        taken = 0
        with os.scandir(self.fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    taken += entry.stat(follow_symlinks=False).st_blocks * 512
        return DirectoryUsage(os.fstat(self.fd).st_mtime, taken)

    def remove(self) -> None:
        """Remove the directory with its content, following no links, and close it.

        Raises:
            UnusableFileError: Something cannot be removed.
        """
        try:
            if self._is_linked():
                # By the path of the descriptor: shutil has no dir_fd before Python 3.11.
                shutil.rmtree(f"/proc/self/fd/{self._base}/{self.name}")
        except OSError as error:
            raise UnusableFileError(
                f"{self.path} cannot be removed ({get_reason(error)})"
            ) from error
        finally:
            self.close()

    def _lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return kind == fcntl.LOCK_SH
        return True

    def _is_linked(self) -> bool:
        try:
            found = os.stat(self.name, dir_fd=self._base, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self.fd))


def prune(base: str, kept: tuple[int, int]) -> None:
    """Remove the oldest ended jobs, so that at most `kept` remain.

    A job that cannot be removed is logged and left in place.

    Args:
        base: The parent directory, as returned by `env.jobs_directory`.
        kept: The maximum number of jobs and of bytes, as returned by `env.jobs_kept`.

    Raises:
        UnusableFileError: `base` is not private to this user.
    """
    ended = []
    for name in list_job_names(base):
        # Skip jobs of other users, and jobs that another process is removing.
        with contextlib.suppress(OSError), JobDirectory(base, name) as job:
            if job.has_ended():
                ended.append((job.measure_usage(), name))
    count, size = 0, 0
    for usage, name in sorted(ended, reverse=True):
        count, size = count + 1, size + usage.size
        if count > kept[0] or size > kept[1]:
            _remove_old(base, name)


def _remove_old(base: str, name: str) -> None:
    try:
        with JobDirectory(base, name) as job:
            if job.lock_exclusive():
                job.remove()
    except FileNotFoundError:  # another process has removed it
        pass
    except UnusableFileError as error:
        _log.warning("phalanx: an old job cannot be removed: %s", error)


def describe_job(name: str, world_size: int, **more: Any) -> dict[str, Any]:
    """Return the content of `job.json`: the properties of a job that are known when it begins.

    Args:
        name: The name of the job.
        world_size: The number of ranks on all hosts.
        more: Further entries from a launcher: `launcher` (its pid) and `hosts`.
    """
    return {
        "version": VERSION,
        "name": name,
        "command": [argument[:4096] for argument in get_command_line()[:256]],
        "cwd": _get_cwd(),
        "started": time.time(),
        "pid_scope": get_pid_scope(),
        "launcher": None,
        "hosts": 1,
        "world_size": world_size,
        **more,
    }


def get_command_line() -> list[str]:
    """Return this process's command line as a user would type it."""
    if sys.argv and sys.argv[0] not in ("", "-", "-c", "-m"):
        return [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    return list(sys.orig_argv)


def get_pid_scope() -> dict[str, Any]:
    """Return the scope in which this process's pids are valid: host, boot and pid namespace."""
    return {"host": os.uname().nodename, "boot": boot_id(), "pids": namespace_id("pid")}


def _get_cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the directory has been removed
        return ""


def _in_child() -> None:
    # The lock is the parent's: a child that inherited it would hold it after the parent's end.
    for job in list(_open_directories):
        job.close()


os.register_at_fork(after_in_child=_in_child)
