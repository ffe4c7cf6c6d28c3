"""The directory of checkpoints: the creation, commit and removal of checkpoints.

The name of a checkpoint, such as `000007-step-1200`, contains its position in the order of saving
and its step. Names that begin with `.saving-` or `.removing-` belong to operations in progress, or
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

from phalanx.checkpoints.files import sync_directory
from phalanx.errors import CheckpointError

_log = logging.getLogger("phalanx")

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_FILE = re.compile(r"manifest\.json|SHA256SUMS|state-\d+\.safetensors")
_LEFTOVER = re.compile(r"\.(saving-probe|(saving|removing)-\d{6,}-step-\d+)-[0-9a-f]{8}")
# Seconds to wait for another process to release the lock. A process that is being killed may still
# be in fsync.
_LOCK_TIMEOUT_SECONDS = 30.0


def parse_step(name: str) -> int | None:
    """Return the step in a checkpoint's name, or None if the name is not one of a checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else None


class CheckpointDirectory:
    """A directory of checkpoints. Only rank 0 begins, commits and removes checkpoints.

    Args:
        path: The path of the directory; `prepare` creates it if it does not exist.
        keep: Number of checkpoints to keep.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep
        #: The names of unusable checkpoints, which are removed first.
        self.unusable_names: set[str] = set()
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
            self._create()
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints to {self.path}: {error.strerror or error}: give a "
                f"directory that this rank can write"
            ) from error

    def _create(self) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_directory(path.parent)
        (self.path / self.write_probe()).unlink()

    def write_probe(self) -> str:
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
        names = [name for name in os.listdir(self.path) if _NAME.fullmatch(name)]
        return sorted(names, key=_sequence_number, reverse=True)

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
        self.wait_for_removals()
        self._remove_leftovers()
        last = max((_sequence_number(name) for name in self.names()), default=0)
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
            _log.warning("%s: cannot remove an old checkpoint: %s", self.path, error)
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

    def wait_for_removals(self) -> None:
        """Wait until the removal of old checkpoints has ended."""
        if self._remover is not None:
            self._remover.join()
            self._remover = None

    def _prune(self) -> None:
        names = [name for name in self.names() if _has_only_checkpoint_files(self.path / name)]
        ranked = [name for name in names if name not in self.unusable_names]
        ranked += [name for name in names if name in self.unusable_names]
        removed: list[Path] = []
        for name in reversed(ranked[self.keep :]):
            # Rename it first, so that a killed process leaves no half-removed checkpoint.
            renamed = self.path / f".removing-{name}-{secrets.token_hex(4)}"
            os.rename(self.path / name, renamed)
            self.unusable_names.discard(name)
            removed.append(renamed)
        if removed:
            sync_directory(self.path)
            # Removing a large file takes half as long as writing it, so do not wait for it.
            self._remover = threading.Thread(target=lambda: list(map(_remove, removed)))
            self._remover.start()

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self.path):
            if _LEFTOVER.fullmatch(name):
                _remove(self.path / name)

    def _acquire(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{self.path}: another process has been saving there for "
                        f"{_LOCK_TIMEOUT_SECONDS:g} s: use a separate directory for each job"
                    ) from None
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                _log.warning(
                    "cannot lock %s (%s): make sure that only one job saves in it",
                    self.path,
                    error.strerror,
                )
                return
            else:
                return


def _sequence_number(name: str) -> int:
    return int(name.partition("-")[0])


def _has_only_checkpoint_files(path: Path) -> bool:
    """Return whether a path is a directory that contains only files of checkpoints."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(_FILE.fullmatch(name) for name in os.listdir(path))


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
        _log.warning("cannot remove %s: %s", path, error)
