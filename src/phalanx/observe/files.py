"""Safe opening of directories and files at paths that may contain anything.

All access is by descriptor: no symbolic link is followed, no FIFO or device is opened, nothing is
read beyond a limit, and owner and type are checked on the opened descriptor.
"""

from __future__ import annotations

import errno
import os
import stat

__all__ = [
    "FLAGS",
    "UnusableFileError",
    "get_reason",
    "make_directory",
    "open_directory",
    "read_file",
]

FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_REMEDY = "remove it, or choose another directory with PHALANX_JOBS_DIR"
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFSOCK: "a socket",
}


class UnusableFileError(OSError):
    """A directory or file that cannot or must not be used; the message states path and reason."""


def make_directory(name: str, path: str, base: int | None = None) -> None:
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
            f"{path} cannot be created ({get_reason(error)}): "
            "choose another directory with PHALANX_JOBS_DIR"
        ) from error


def open_directory(name: str, path: str, base: int | None = None) -> int:
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
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | FLAGS, dir_fd=base)
    except (FileNotFoundError, UnusableFileError):
        raise
    except OSError as error:
        raise UnusableFileError(
            f"{path} cannot be opened ({get_reason(error)}): {_REMEDY}"
        ) from error
    try:
        _check_owner(path, os.fstat(fd))
    except UnusableFileError:
        os.close(fd)
        raise
    return fd


def read_file(directory: int, name: str, limit: int) -> bytes:
    """Return the content of a file; never blocks.

    Args:
        directory: A descriptor of the directory that contains the file.
        name: The name of the file.
        limit: The maximum size of the file in bytes.

    Raises:
        FileNotFoundError: The file does not exist.
        UnusableFileError: It is not a regular file, is larger than `limit`, or cannot be read.
    """
    try:
        _check_file(name, os.stat(name, dir_fd=directory, follow_symlinks=False), limit)
        # By now the file may have been replaced, so opening it must not block either.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | FLAGS
        fd = os.open(name, flags, dir_fd=directory)
        with os.fdopen(fd, "rb", buffering=0):
            _check_file(name, os.fstat(fd), limit)
            return _read_all(fd, limit)
    except (FileNotFoundError, UnusableFileError):
        raise
    except OSError as error:
        raise UnusableFileError(f"{name} cannot be read ({get_reason(error)})") from error


def get_reason(error: OSError) -> str:
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


def _read_all(fd: int, limit: int) -> bytes:
    chunks = []
    while limit > 0 and (chunk := os.read(fd, limit)):
        chunks.append(chunk)
        limit -= len(chunk)
    return b"".join(chunks)
