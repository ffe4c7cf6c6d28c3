"""Opening directories and files in whose place anything may lie, without being led astray.

All goes by descriptors: no symbolic link is followed, no FIFO or device opened, nothing read beyond
a bound, and owner and kind are checked on what has been opened.
"""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["FLAGS", "Refused", "make_directory", "open_directory", "read_file", "reason"]

FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_REMEDY = "remove it, or choose another place with PHALANX_JOBS_DIR"
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFSOCK: "a socket",
}


class Refused(OSError):  # noqa: N818 - as PermissionError's kin, it is named for what happened
    """A directory or file that can't or must not be used: which, what is wrong, what to do."""


def make_directory(name: str, path: str, base: int | None = None) -> None:
    """Make a directory for this user alone, unless there is something of that name.

    Args:
        name: of the directory, relative to `base`.
        path: for the message.
        base: descriptor of the directory in which it goes.

    Raises:
        Refused: it can't be made.
    """
    try:
        os.mkdir(name, 0o700, dir_fd=base)
    except FileExistsError:
        pass  # whatever it is: who opens it, sees
    except OSError as error:
        raise Refused(
            f"{path} can't be made ({reason(error)}): choose another place with PHALANX_JOBS_DIR"
        ) from error


def open_directory(name: str, path: str, base: int | None = None) -> int:
    """Open a directory that this user alone can write; returns its descriptor.

    Args:
        name: of the directory, relative to `base`.
        path: for the message.
        base: descriptor of the directory in which it is.

    Raises:
        FileNotFoundError: there is none.
        Refused: it is something else, another user's, can be written by others, or can't be opened.
    """
    try:
        found = os.stat(name, dir_fd=base, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            raise Refused(f"{path} is {_kind(found)}, expected a directory: {_REMEDY}")
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | FLAGS, dir_fd=base)
    except (FileNotFoundError, Refused):
        raise
    except OSError as error:
        raise Refused(f"{path} can't be opened ({reason(error)}): {_REMEDY}") from error
    try:
        _check_owner(path, os.fstat(fd))
    except Refused:
        os.close(fd)
        raise
    return fd


def read_file(directory: int, name: str, limit: int) -> bytes:
    """What a file holds; never waits for anything.

    Args:
        directory: descriptor of the directory in which it is.
        name: of the file.
        limit: how many bytes it may have.

    Raises:
        FileNotFoundError: there is none.
        Refused: it is something else, has more bytes, or can't be read.
    """
    try:
        _check_file(name, os.stat(name, dir_fd=directory, follow_symlinks=False), limit)
        # By now it may be something else: opening that must not wait either.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | FLAGS
        fd = os.open(name, flags, dir_fd=directory)
        with os.fdopen(fd, "rb", buffering=0):
            _check_file(name, os.fstat(fd), limit)
            return _read_all(fd, limit)
    except (FileNotFoundError, Refused):
        raise
    except OSError as error:
        raise Refused(f"{name} can't be read ({reason(error)})") from error


def reason(error: OSError) -> str:
    """What the system says of an error, without the path."""
    return os.strerror(error.errno or errno.EIO)


def _check_owner(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise Refused(
            f"{path} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}: {_REMEDY}"
        )
    if found.st_mode & 0o022:
        raise Refused(
            f"{path} can be written by others (its mode is {stat.S_IMODE(found.st_mode):04o}, "
            f"expected 0700): chmod it, {_REMEDY}"
        )


def _check_file(name: str, found: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Refused(f"{name} is {_kind(found)}, expected a file")
    if found.st_size > limit:
        raise Refused(f"{name} has {found.st_size} bytes, expected at most {limit}")


def _kind(found: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(found.st_mode), "a device")


def _read_all(fd: int, limit: int) -> bytes:
    pieces = []
    while limit > 0 and (piece := os.read(fd, limit)):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)
