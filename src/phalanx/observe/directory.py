"""Where jobs keep what they write: a private directory for each, found again by its name.

A process of a job holds a lock on its directory as long as it lives. The kernel lets go of it with
the process, however that ends: a directory that nobody holds belongs to a job that has ended.
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
    Refused,
    make_directory,
    open_directory,
    read_file,
    reason,
)

__all__ = [
    "BOX",
    "JOB",
    "NOTES",
    "VERSION",
    "Directory",
    "Refused",
    "Usage",
    "command_line",
    "description",
    "names",
    "new_name",
    "place",
    "prune",
]

VERSION = 1
"""Of what `job.json` and `launcher.jsonl` hold; a black box has a version of its own."""
JOB = "job.json"
NOTES = "launcher.jsonl"
BOX = re.compile(r"([1-9][0-9]{0,9})\.box", re.ASCII)
"""The name of a black box: the pid of its process."""

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
# Those who look or remove hold a directory alone for a moment.
_HOLD_SECONDS = 2.0
_log = logging.getLogger("phalanx")
_open: weakref.WeakSet[Directory] = weakref.WeakSet()


class Usage(NamedTuple):
    """When a job's directory was last added to (Unix seconds), and its bytes on the disk."""

    time: float
    size: int


def new_name() -> str:
    """A name that no other job has: the time, to be read, and something random."""
    random = "".join(secrets.choice(_ALPHABET) for _ in range(6))
    return f"{time.strftime('%Y%m%d-%H%M')}-{random}"


def names(base: str) -> list[str]:
    """The names of all jobs in a directory, in alphabetical order; none if it is missing.

    Raises:
        Refused: the directory isn't this user's alone.
    """
    try:
        fd = open_directory(base, base)
    except FileNotFoundError:
        return []
    try:
        return sorted(name for name in os.listdir(fd) if env.JOB_NAME.fullmatch(name))
    finally:
        os.close(fd)


class Directory:
    """The directory of one job, open; a context manager that closes it.

    Attributes:
        base: path of the directory in which it is.
        name: of the job.
        path: for people; what is done goes by descriptors.
        fd: its descriptor; -1 once closed, or in a forked child.
    """

    def __init__(self, base: str, name: str, *, create: bool = False) -> None:
        """Open it, or make it if there is none.

        Args:
            base: as `env.jobs_directory` says.
            name: of the job; whoever gives it has compared it with `env.JOB_NAME`.
            create: make it, and `base`, where they are missing.

        Raises:
            FileNotFoundError: it is missing.
            Refused: it can't be made or opened, or isn't this user's alone.
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
        _open.add(self)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it, and let go of it. A second call does nothing."""
        if self.fd != -1:
            os.close(self.fd)
            os.close(self._base)
            self.fd = self._base = -1

    def hold(self) -> None:
        """Show that a process of the job lives, until this is closed or the process ends.

        Waits two seconds at most for somebody who looks or removes.

        Raises:
            Refused: it has been removed, or is being.
        """
        deadline = time.monotonic() + _HOLD_SECONDS
        while not (held := self._lock(fcntl.LOCK_SH)) and time.monotonic() < deadline:
            time.sleep(0.001)
        if not held or not self._is_linked():
            raise Refused(f"{self.path} has just been removed")

    def claim(self) -> bool:
        """Hold it alone, if no other process of the job lives; else hold it no longer.

        Where the file system has no locks every job seems to live, and none is removed.
        """
        return self._lock(fcntl.LOCK_EX)

    def ended(self) -> bool:
        """Whether no process of the job lives any more; as `claim` without holding it.

        Not for one who holds it: it would let go.
        """
        ended = self.claim()
        if ended:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        return ended

    def create(self, name: str, flags: int = 0) -> int:
        """Make a file that this user alone can read; returns its descriptor, for writing.

        Raises:
            OSError: there is one already, or it can't be made.
        """
        flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | FLAGS
        return os.open(name, flags, 0o600, dir_fd=self.fd)

    def describe(self, description: dict[str, Any]) -> None:
        """Write `job.json`; readers find all of it or nothing.

        Raises:
            OSError: it can't be written.
        """
        part = f"{JOB}.{os.getpid()}"
        with os.fdopen(self.create(part), "wb") as file:
            file.write(json.dumps(description).encode())
        os.rename(part, JOB, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def read(self, name: str, limit: int) -> bytes:
        """What a file of it holds, up to `limit` bytes; raises as `files.read_file` does."""
        return read_file(self.fd, name, limit)

    def boxes(self) -> dict[int, str]:
        """The names of the black boxes, by pid, in order."""
        found = filter(None, map(BOX.fullmatch, os.listdir(self.fd)))
        return dict(sorted((int(match[1]), match[0]) for match in found))

    def usage(self) -> Usage:
        """When something was last added to it, and what it takes on the disk."""
        taken = 0
        with os.scandir(self.fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    taken += entry.stat(follow_symlinks=False).st_blocks * 512
        return Usage(os.fstat(self.fd).st_mtime, taken)

    def remove(self) -> None:
        """Remove it with all that is in it, following no link, and close it.

        Raises:
            Refused: something can't be removed.
        """
        try:
            if self._is_linked():
                # By the descriptor's path: shutil takes no dir_fd before Python 3.11.
                shutil.rmtree(f"/proc/self/fd/{self._base}/{self.name}")
        except OSError as error:
            raise Refused(f"{self.path} can't be removed ({reason(error)})") from error
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
    """Remove the oldest of the jobs that have ended, so that no more than `kept` stay.

    What can't be removed is logged and left.

    Args:
        base: as `env.jobs_directory` says.
        kept: how many jobs, and how many bytes, as `env.jobs_kept` says.

    Raises:
        Refused: `base` isn't this user's alone.
    """
    ended = []
    for name in names(base):
        # One that isn't ours, or that somebody removes now, is not for us to remove.
        with contextlib.suppress(OSError), Directory(base, name) as job:
            if job.ended():
                ended.append((job.usage(), name))
    count, size = 0, 0
    for usage, name in sorted(ended, reverse=True):
        count, size = count + 1, size + usage.size
        if count > kept[0] or size > kept[1]:
            _remove_old(base, name)


def _remove_old(base: str, name: str) -> None:
    try:
        with Directory(base, name) as job:
            if job.claim():
                job.remove()
    except FileNotFoundError:  # somebody else was faster
        pass
    except Refused as error:
        _log.warning("phalanx: an old job can't be removed: %s", error)


def description(name: str, world_size: int, **more: Any) -> dict[str, Any]:
    """What `job.json` holds: what is known of a job when it begins.

    Args:
        name: of the job.
        world_size: how many ranks it has, on all hosts.
        more: what a launcher adds: `launcher` (its pid), `hosts`.
    """
    return {
        "version": VERSION,
        "name": name,
        "command": [argument[:4096] for argument in command_line()[:256]],
        "cwd": _cwd(),
        "started": time.time(),
        "place": place(),
        "launcher": None,
        "hosts": 1,
        "world_size": world_size,
        **more,
    }


def command_line() -> list[str]:
    """This process's command line, as a person would write it."""
    if sys.argv and sys.argv[0] not in ("", "-", "-c", "-m"):
        return [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    return list(sys.orig_argv)


def place() -> dict[str, Any]:
    """Where a pid means what it means here: the machine, since it was started, and namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return {"host": os.uname().nodename, "boot": boot, "pids": os.stat("/proc/self/ns/pid").st_ino}


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed
        return ""


def _in_child() -> None:
    # The lock is the parent's: a child that kept it would hold it when the parent is gone.
    for job in list(_open):
        job.close()


os.register_at_fork(after_in_child=_in_child)
