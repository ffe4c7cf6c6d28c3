"""The private directory in which a job keeps its files, found by the job's name.

Each process of a job holds a shared lock on the directory as long as it is alive. The kernel
releases the lock when the process ends, for whatever reason. A directory that is not locked belongs
to a job that has ended.

Paths may contain anything, so all access is by descriptor: no symbolic link is followed, no FIFO or
device is opened, nothing is read beyond a limit, and owner and type are checked on the opened
descriptor.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import stat
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx import env
from phalanx.system.escape import escape
from phalanx.system.host_identity import boot_id, namespace_id
from phalanx.system.polling import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 1
"""The format version of `job.json` and `launcher.jsonl`; recorders have their own version."""
JOB_FILE = "job.json"
LAUNCHER_LOG_FILE = "launcher.jsonl"
CALL_LOG_VERSION = 1
"""The format version of the files with the pending calls of RPC workers."""
MAX_TRACEBACK_SIZE = 1 << 18
"""The size in bytes to which a kept traceback is cut at its beginning."""
_RECORDER_FILE = re.compile(r"([1-9][0-9]{0,9})\.recorder", re.ASCII)
"""The file name of a flight recorder, which contains the pid of its process."""
_TORCH_FILE = re.compile(r"([1-9][0-9]{0,9})\.torch", re.ASCII)
"""The same of what PyTorch has recorded."""

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_REMEDY = "remove it, or choose another directory with PHALANX_JOBS_DIR"
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFSOCK: "a socket",
}
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
# Processes that inspect or remove a directory hold it exclusively for a moment.
_LOCK_SECONDS = 2.0
_log = logging.getLogger("phalanx")
_open_directories: weakref.WeakSet[JobDirectory] = weakref.WeakSet()


class UnusableFileError(OSError):
    """A directory or file that cannot or must not be used; the message states path and reason."""


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
    return f"{pid}.recorder"


def get_traceback_name(pid: int) -> str:
    """Return the file name of the whole traceback of a process that has printed a short one."""
    return f"{pid}.traceback"


def get_torch_record_name(pid: int) -> str:
    """Return the file name of what PyTorch has recorded of a process's groups."""
    return f"{pid}.torch"


def list_job_names(base: str) -> list[str]:
    """Return the names of all jobs in a directory, sorted; empty if the directory is missing.

    Raises:
        UnusableFileError: The directory is not private to this user.
    """
    try:
        fd = _open_directory(base, base)
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
            _make_directory(base, base)
        self._base = _open_directory(base, base)
        try:
            if create:
                _make_directory(name, self.path, self._base)
            self.fd = _open_directory(name, self.path, self._base)
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
        held = wait_until(lambda: self._lock(fcntl.LOCK_SH), _LOCK_SECONDS, longest=0.001)
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
        flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS
        return os.open(name, flags, 0o600, dir_fd=self.fd)

    def write_description(self, world_size: int, **more: Any) -> None:
        """Write `job.json` atomically: the properties of the job that are known when it begins.

        Args:
            world_size: The number of ranks on all hosts.
            more: Further entries: from a launcher `launcher` (its pid) and `hosts`, otherwise
                `store_host` (the rank that hosts the store, None if it is unknown).

        Raises:
            OSError: The file cannot be written.
        """
        description = {
            "version": VERSION,
            "name": self.name,
            "command": [argument[:4096] for argument in get_command_line()[:256]],
            "cwd": _get_cwd(),
            "started": time.time(),
            "pid_scope": get_pid_scope(),
            "launcher": None,
            "store_host": None,
            "hosts": 1,
            "world_size": world_size,
            **more,
        }
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

    def touch(self, name: str) -> None:
        """Give a file the present time.

        Raises:
            OSError: There is no such file any more, or it belongs to another user.
        """
        os.utime(name, dir_fd=self.fd, follow_symlinks=False)

    def get_time(self, name: str) -> int:
        """Return the time of a file, in Unix nanoseconds.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mtime_ns

    def create_once(self, name: str, content: bytes) -> bytes:
        """Create a file atomically unless it exists; return the content that it has.

        Raises:
            OSError: The file cannot be written or read.
        """
        part = f"{name}.{os.getpid()}"
        with os.fdopen(self.create(part), "wb") as file:
            file.write(content)
        try:
            os.link(part, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            return self.read(name, len(content) + 64)
        finally:
            os.unlink(part, dir_fd=self.fd)
        return content

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a file; never blocks.

        Args:
            name: The name of the file.
            limit: The maximum size of the file in bytes.

        Raises:
            FileNotFoundError: The file does not exist.
            UnusableFileError: It is not a regular file, is larger than `limit`, or cannot be read.
        """
        try:
            _check_file(name, os.stat(name, dir_fd=self.fd, follow_symlinks=False), limit)
            # By now the file may have been replaced, so opening it must not block either.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | _FLAGS
            fd = os.open(name, flags, dir_fd=self.fd)
            with os.fdopen(fd, "rb") as file:
                _check_file(name, os.fstat(fd), limit)
                return file.read(limit)
        except (FileNotFoundError, UnusableFileError):
            raise
        except OSError as error:
            raise UnusableFileError(f"{name} cannot be read ({_get_reason(error)})") from error

    def list_recorders(self) -> dict[int, str]:
        """Return the names of the flight recorders by pid, sorted by pid."""
        found = filter(None, map(_RECORDER_FILE.fullmatch, os.listdir(self.fd)))
        return dict(sorted((int(match[1]), match[0]) for match in found))

    def list_torch_records(self) -> dict[int, str]:
        """Return the names of the files with PyTorch's records by pid, sorted by pid."""
        found = filter(None, map(_TORCH_FILE.fullmatch, os.listdir(self.fd)))
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
                f"{self.path} cannot be removed ({_get_reason(error)})"
            ) from error
        finally:
            self.close()

    def discard(self) -> None:
        """Remove the directory like `remove`, but only log a failure."""
        try:
            self.remove()
        except UnusableFileError as error:
            _log.warning("phalanx: %s", error)

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


def get_command_line() -> list[str]:
    """Return this process's command line as a user would type it."""
    if sys.argv and sys.argv[0] not in ("", "-", "-c", "-m"):
        return [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    return list(sys.orig_argv)


def get_pid_scope() -> dict[str, Any]:
    """Return the scope in which this process's pids are valid: host, boot and pid namespace."""
    return {"host": os.uname().nodename, "boot": boot_id(), "pids": namespace_id("pid")}


def get_base_directory() -> str:
    """Return the directory that contains the jobs' directories.

    Raises:
        UsageError: `PHALANX_JOBS_DIR` is malformed.
    """
    try:
        return env.jobs_directory()
    except ValueError as error:
        raise _make_usage_error(str(error)) from None


def list_jobs() -> list[str]:
    """Return the names of all jobs, the newest first.

    Raises:
        UsageError: The directory of the jobs cannot be used.
    """
    base = get_base_directory()
    try:
        found = list_job_names(base)
    except OSError as error:
        raise _make_usage_error(str(error)) from None
    times = {}
    for name in found:
        # A job that cannot be opened is listed last; opening it later reports the reason.
        times[name] = 0.0
        with contextlib.suppress(OSError), JobDirectory(base, name) as job:
            times[name] = job.measure_usage().time
    return sorted(found, key=lambda name: (times[name], name), reverse=True)


def find_job(text: str | None = None) -> JobDirectory:
    """Open the directory of a job; the caller must close it.

    Args:
        text: The name of the job or a unique prefix of it; None for the newest job.

    Raises:
        UsageError: There is no such job, or more than one, and the message names similar ones; or
            the directory cannot be used.
    """
    base = get_base_directory()
    found = list_jobs()
    name = _match_name(text, found, base)
    try:
        return JobDirectory(base, name)
    except FileNotFoundError:
        raise _make_usage_error(f"job {name} has just been removed") from None
    except OSError as error:
        raise _make_usage_error(str(error)) from None


def list_running_jobs(base: str) -> list[str]:
    """Return the names of the running jobs in a directory; skip jobs that cannot be opened."""
    found = []
    for name in list_job_names(base):
        with contextlib.suppress(OSError), JobDirectory(base, name) as job:
            if not job.has_ended():
                found.append(name)
    return found


def remove_job(text: str) -> str:
    """Remove the directory of a job that has ended, and return the job's name.

    Args:
        text: The job, as for `find_job`.

    Raises:
        UsageError: There is no such job, it is still running, or it cannot be removed completely.
    """
    with find_job(text) as job:
        if not job.lock_exclusive():
            raise _make_usage_error(f"job {job.name} is still running: end it first")
        try:
            job.remove()
        except OSError as error:
            raise _make_usage_error(str(error)) from None
        return job.name


def _get_cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the directory has been removed
        return ""


def _make_directory(name: str, path: str, base: int | None = None) -> None:
    """Create a directory that only this user can access, unless the name already exists.

    Args:
        name: The name of the directory, relative to `base`.
        path: The path to show in error messages.
        base: A descriptor of the parent directory.

    Raises:
        UnusableFileError: The directory cannot be created.
    """
    try:
        os.mkdir(name, 0o700, dir_fd=base)
    except FileExistsError:
        pass  # of any type: opening it checks the type
    except OSError as error:
        raise UnusableFileError(
            f"{path} cannot be created ({_get_reason(error)}): "
            "choose another directory with PHALANX_JOBS_DIR"
        ) from error


def _open_directory(name: str, path: str, base: int | None = None) -> int:
    """Open a directory that only this user can write to, and return its descriptor.

    Args:
        name: The name of the directory, relative to `base`.
        path: The path to show in error messages.
        base: A descriptor of the parent directory.

    Raises:
        FileNotFoundError: The directory does not exist.
        UnusableFileError: It is not a directory, belongs to another user, can be written to by
            others, or cannot be opened.
    """
    try:
        found = os.stat(name, dir_fd=base, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            raise UnusableFileError(
                f"{path} is {_describe_kind(found)}, expected a directory: {_REMEDY}"
            )
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=base)
    except (FileNotFoundError, UnusableFileError):
        raise
    except OSError as error:
        raise UnusableFileError(
            f"{path} cannot be opened ({_get_reason(error)}): {_REMEDY}"
        ) from error
    try:
        _check_owner(path, os.fstat(fd))
    except UnusableFileError:
        os.close(fd)
        raise
    return fd


def _get_reason(error: OSError) -> str:
    """Return the system's message for an error, without the path."""
    return os.strerror(error.errno or errno.EIO)


def _check_owner(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise UnusableFileError(
            f"{path} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}: {_REMEDY}"
        )
    if found.st_mode & 0o022:
        raise UnusableFileError(
            f"{path} is writable by others (its mode is {stat.S_IMODE(found.st_mode):04o}, "
            f"expected 0700): chmod it, {_REMEDY}"
        )


def _check_file(name: str, found: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnusableFileError(f"{name} is {_describe_kind(found)}, expected a file")
    if found.st_size > limit:
        raise UnusableFileError(f"{name} has {found.st_size} bytes, expected at most {limit}")


def _describe_kind(found: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(found.st_mode), "a device")


def _match_name(text: str | None, found: Sequence[str], base: str) -> str:
    given = "" if text is None else escape(repr(text), 80)
    if not found:
        raise _make_usage_error(
            f"there is no job{given and ' '}{given} in {base}: only running and failed jobs are "
            "kept there, and those of `phalanx run --keep-record`"
        )
    if text is None or text in found:
        return found[0] if text is None else text
    matches = [name for name in found if text and name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise _make_usage_error(
            f"{given} matches more than one job, {_enumerate_names(matches)}: give more of the name"
        )
    near = difflib.get_close_matches(text[:100], found, n=3)
    hint = (
        f"did you mean {_enumerate_names(near)}?" if near else f"expected {_enumerate_names(found)}"
    )
    raise _make_usage_error(f"there is no job {given} in {base}: {hint} (`phalanx jobs` lists all)")


def _enumerate_names(found: Sequence[str]) -> str:
    shown = [*found[:3], *([f"{len(found) - 3} more"] if len(found) > 3 else [])]
    return " or ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _make_usage_error(message: str) -> ValueError:
    # Imported here because it imports torch: `phalanx jobs` must respond at once.
    from phalanx.usage_errors import UsageError

    return UsageError(message)


def _in_child() -> None:
    # The lock is the parent's: a child that inherited it would hold it after the parent's end.
    for job in list(_open_directories):
        job.close()


os.register_at_fork(after_in_child=_in_child)
