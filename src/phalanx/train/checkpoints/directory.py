"""The directory of checkpoints: the creation, commit and removal of checkpoints.

The name of a checkpoint, such as `000007-step-1200`, contains its position in the order of saving and
its step. Names that begin with `.saving-` or `.removing-` belong to operations in progress, or
remain from a killed process. Entries other than these and checkpoints are never modified.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import time
from pathlib import Path

from phalanx.errors import CheckpointError
from phalanx.train.checkpoints.files import sync_directory

__all__ = ["Directory", "step_in"]

_log = logging.getLogger("phalanx")

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_FILE = re.compile(r"manifest\.json|SHA256SUMS|state-\d+\.safetensors")
_LEFT = re.compile(r"\.(saving-probe|(saving|removing)-\d{6,}-step-\d+)-[0-9a-f]{8}")
# Seconds to wait for another process to release the lock. A process that is being killed may still
# be in fsync.
_PATIENCE = 30.0


def step_in(name: str) -> int | None:
    """Return the step in the name of a checkpoint, or None if the name is not that of a checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else None


class Directory:
    """A directory of checkpoints. Only rank 0 begins, commits and removes checkpoints.

    Args:
        path: The path of the directory; `prepare` creates it if it does not exist.
        keep: Number of checkpoints to keep.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep
        #: Names of checkpoints found to be unusable; they are removed first.
        self.bad: set[str] = set()
        self._lock: int | None = None
        self._temporary: Path | None = None
        self._remover: threading.Thread | None = None
        self._name = ""

    def prepare(self) -> None:
        """Create the directory, and check that it can be written.

        Raises:
            CheckpointError: The directory cannot be created or written.
        """
        try:
            self._make()
        except OSError as error:
            raise CheckpointError(
                f"{self.path} can't hold checkpoints: {error.strerror or error}: give a "
                f"directory that this rank can write"
            ) from error

    def _make(self) -> None:
        above = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in above:
            sync_directory(path.parent)
        (self.path / self.leave_probe()).unlink()

    def leave_probe(self) -> str:
        """Write a small probe file, and return its name.

        Raises:
            OSError: The file cannot be written; no partial file remains.
        """
        probe = self.path / f".saving-probe-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"phalanx")
        except OSError:
            probe.unlink(missing_ok=True)
            raise
        return probe.name

    def names(self) -> list[str]:
        """Return the names of all checkpoints, the most recently saved first."""
        found = [name for name in os.listdir(self.path) if _NAME.fullmatch(name)]
        return sorted(found, key=_number, reverse=True)

    def begin(self, step: int) -> Path:
        """Create a temporary directory for the files of a checkpoint, and lock out other processes.

        Blocks for up to 30 s while another process holds the lock, and until the removal of old
        checkpoints has ended.

        Returns:
            The path of the temporary directory.

        Raises:
            OSError: The directory cannot be created.
            CheckpointError: Another process is still saving there.
        """
        self._acquire()
        self.settle()
        self._clean()
        last = max((_number(name) for name in self.names()), default=0)
        self._name = f"{last + 1:06d}-step-{step}"
        temporary = self.path / f".saving-{self._name}-{secrets.token_hex(4)}"
        self._temporary = temporary
        temporary.mkdir()
        return temporary

    def commit(self) -> Path:
        """Rename the temporary directory to its final name, and remove checkpoints beyond `keep`.

        The files in it must already be on disk.

        Returns:
            The path of the checkpoint.

        Raises:
            OSError: The checkpoint cannot be committed; `end` then removes it unless it has its
                final name already.
        """
        assert self._temporary is not None  # called once between begin and end
        final = self.path / self._name
        sync_directory(self._temporary)
        os.rename(self._temporary, final)
        self._temporary = None
        sync_directory(self.path)
        try:
            self._prune()
        except OSError as error:
            _log.warning("%s: an old checkpoint can't be removed: %s", self.path, error)
        return final

    def end(self) -> None:
        """Remove a checkpoint that was not committed, and release the lock."""
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            _remove(temporary)
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):  # nothing was written, and it is closed even so
                os.close(lock)

    def settle(self) -> None:
        """Wait until the removal of old checkpoints has ended."""
        if self._remover is not None:
            self._remover.join()
            self._remover = None

    def _prune(self) -> None:
        names = [name for name in self.names() if _is_ours(self.path / name)]
        ranked = [name for name in names if name not in self.bad]
        ranked += [name for name in names if name in self.bad]
        removed: list[Path] = []
        for name in reversed(ranked[self.keep :]):
            # Rename it first, so that a killed process leaves no half-removed checkpoint.
            away = self.path / f".removing-{name}-{secrets.token_hex(4)}"
            os.rename(self.path / name, away)
            self.bad.discard(name)
            removed.append(away)
        if removed:
            sync_directory(self.path)
            # Removing a large file takes half as long as writing it, so do not wait for it.
            self._remover = threading.Thread(target=_remove_all, args=(removed,))
            self._remover.start()

    def _clean(self) -> None:
        for name in os.listdir(self.path):
            if _LEFT.fullmatch(name):
                _remove(self.path / name)

    def _acquire(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{self.path}: another process has been saving there for {_PATIENCE:g} s: "
                        "give each job a directory of its own"
                    ) from None
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                _log.warning(
                    "%s can't be locked there (%s): make sure that only one job saves in it",
                    self.path,
                    error.strerror,
                )
                return
            else:
                return


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _is_ours(path: Path) -> bool:
    """Return whether a path is a directory that contains only files of checkpoints."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(_FILE.fullmatch(name) for name in os.listdir(path))


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a directory or a file, and log a warning if that fails."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return  # another process has removed it
    except OSError as error:
        _log.warning("%s can't be removed: %s", path, error)
