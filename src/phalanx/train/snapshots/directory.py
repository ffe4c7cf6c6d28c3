"""The names in the directory of snapshots: how one begins, is committed and is removed.

A name says in which order snapshots were saved, and at which step: `000007-step-1200`. What begins
with `.saving-` or `.removing-` is what a death left behind. Nothing else is ever touched.
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

from phalanx.errors import SnapshotError
from phalanx.train.snapshots.files import sync_directory

__all__ = ["Directory", "step_in"]

_log = logging.getLogger("phalanx")

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_FILE = re.compile(r"manifest\.json|SHA256SUMS|state-\d+\.safetensors")
_LEFT = re.compile(r"\.(saving-probe|(saving|removing)-\d{6,}-step-\d+)-[0-9a-f]{8}")
# Seconds to wait for another process that saves: one that is being killed may still sync.
_PATIENCE = 30.0


def step_in(name: str) -> int | None:
    """Return the step that a name says, None if it isn't a snapshot's."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else None


class Directory:
    """A directory of snapshots, as the one rank sees it that changes it.

    Args:
        path: Made if it isn't there.
        keep: How many snapshots stay.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep
        #: Names of snapshots that were found to be unusable; they go first.
        self.bad: set[str] = set()
        self._lock: int | None = None
        self._temporary: Path | None = None
        self._remover: threading.Thread | None = None
        self._name = ""

    def prepare(self) -> None:
        """Make the directory, and try that it can be written.

        Raises:
            SnapshotError: It can't.
        """
        try:
            self._make()
        except OSError as error:
            raise SnapshotError(
                f"{self.path} can't hold snapshots: {error.strerror or error}: give a "
                f"directory that this rank can write"
            ) from error

    def _make(self) -> None:
        above = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in above:
            sync_directory(path.parent)
        (self.path / self.leave_probe()).unlink()

    def leave_probe(self) -> str:
        """Write a small file, and return its name.

        Raises:
            OSError: It can't be written; nothing is left of it.
        """
        probe = self.path / f".saving-probe-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"phalanx")
        except OSError:
            probe.unlink(missing_ok=True)
            raise
        return probe.name

    def names(self) -> list[str]:
        """Return the names of all snapshots, the one saved last first."""
        found = [name for name in os.listdir(self.path) if _NAME.fullmatch(name)]
        return sorted(found, key=_number, reverse=True)

    def begin(self, step: int) -> Path:
        """Return a new directory for the files of a snapshot; lock out other processes that save.

        Raises:
            OSError: The directory can't be made.
            SnapshotError: Another process saves there.
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
        """Give what `begin` began its name, once its files are on the disk; remove what is too old.

        Raises:
            OSError: The system's; `end` then removes what has no name yet.
        """
        assert self._temporary is not None  # between begin and end, by the one caller
        final = self.path / self._name
        sync_directory(self._temporary)
        os.rename(self._temporary, final)
        self._temporary = None
        sync_directory(self.path)
        try:
            self._prune()
        except OSError as error:
            _log.warning("%s: an old snapshot can't be removed: %s", self.path, error)
        return final

    def end(self) -> None:
        """Remove what wasn't committed, and let other processes save."""
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            _remove(temporary)
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):  # nothing was written through it, and it is closed
                os.close(lock)

    def settle(self) -> None:
        """Wait until what is no longer needed is removed."""
        if self._remover is not None:
            self._remover.join()
            self._remover = None

    def _prune(self) -> None:
        names = [name for name in self.names() if _is_ours(self.path / name)]
        ranked = [name for name in names if name not in self.bad]
        ranked += [name for name in names if name in self.bad]
        removed: list[Path] = []
        for name in reversed(ranked[self.keep :]):
            # Under another name first: a death while it is removed must not leave half of it.
            away = self.path / f".removing-{name}-{secrets.token_hex(4)}"
            os.rename(self.path / name, away)
            self.bad.discard(name)
            removed.append(away)
        if removed:
            sync_directory(self.path)
            # A large file takes half as long to remove as to write: nobody need wait for it.
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
                    raise SnapshotError(
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
    """Whether a directory holds what snapshots hold and nothing else."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(_FILE.fullmatch(name) for name in os.listdir(path))


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a directory or a file that no snapshot needs; say so if that fails."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return  # another process was quicker
    except OSError as error:
        _log.warning("%s can't be removed: %s", path, error)
