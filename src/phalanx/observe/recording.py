"""This process's black box: made for its first group, marked when it ends.

A process has one box while it lives, whatever groups it forms. The native core writes to it; from
here come training progress and how the process ends.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import multiprocessing.util
import operator
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

from phalanx import _native, env
from phalanx.errors import UsageError
from phalanx.observe import last_words
from phalanx.observe.boxes import ended_well, read_box
from phalanx.observe.directory import Directory, Refused, description, new_name, prune

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

__all__ = ["close", "open_for_group", "own_directory", "report"]

_KEY = "phalanx/job"
_WARNED = "phalanx/job/warned"
_log = logging.getLogger("phalanx")
_lock = threading.Lock()


@dataclass(frozen=True)
class _Own:
    """This process's box: where it is, and who looks after the job's directory."""

    directory: Directory | None
    """None: in memory only."""
    launched: bool
    world_size: int

    @property
    def where(self) -> str:
        """What other ranks are told."""
        return self.directory.path if self.directory else env.NO_JOB


@dataclass(frozen=True)
class _Job:
    """What this process knows of its job before it has a box."""

    store: Store
    rank: int
    world_size: int
    attempt: int
    base: str
    kept: tuple[int, int]
    name: str | None
    """As `PHALANX_JOB` says; None: nobody has said it."""


_own: _Own | None = None
_silent = False
_note = ""


def open_for_group(store: Store, rank: int, size: int) -> None:
    """Make sure that this process has a black box, before it joins a group.

    Its job is the one that the launcher named; else the ranks agree on one through the store, of
    which the first to come makes the directory. None waits for another. Where there can be no file
    the box is in memory, which is gone with the process, and one rank logs a warning.

    Args:
        store: the group's. Keys begin with "phalanx/".
        rank: this process's rank in the group.
        size: world size of the group.

    Raises:
        UsageError: a malformed environment variable.
    """
    global _own  # noqa: PLW0603
    with _lock:
        if _own is None:
            _own = _open(_job(store, rank, size))
            # Now, since a group that can't be formed is what ends a process too.
            last_words.install()
        elif size > 1 and not _own.launched and not _initialized():
            # Processes that are new in this group are told where the others are.
            store.compare_set(_KEY, "", _own.where)


def report(
    *,
    step: SupportsIndex | None = None,
    loss: SupportsFloat | None = None,
    note: str | None = None,
) -> None:
    """Say how far training is, for `phalanx watch`, `phalanx explain` and `phalanx trace`.

    It is written to this process's black box, which takes a microsecond or so; nothing is sent and
    nobody is waited for (but the value of a loss on a GPU is). Without a group of the backend
    "phalanx" it does nothing, and says so once, in the log.

    Args:
        step: the number of the training step, 0 or more.
        loss: a number, or a tensor of one element. NaN and infinity are shown as what they are.
        note: what the rank is doing, "evaluating" for example, until the next one; of more than 255
            bytes of UTF-8 the first are kept.

    Raises:
        UsageError: nothing was given, or something that can't be shown.

    Example:
        >>> for step, batch in enumerate(batches):
        ...     loss = train(batch)
        ...     phalanx.report(step=step, loss=loss)
    """
    number = -1 if step is None else _step(step)
    value = None if loss is None else _loss(loss)
    global _note  # noqa: PLW0603
    if note is not None:
        _check_note(note)
        _note = note
    elif step is None and loss is None:
        raise UsageError("report: nothing was given, expected step, loss or note")
    if _own is None:
        _say_once()
    else:
        _native.report(number, value, _note)


def own_directory() -> Directory | None:
    """The directory of this process's job; None where its black box is in memory, or isn't."""
    return None if _own is None else _own.directory


def close() -> None:
    """Note that this process ends; the last of a job without a launcher tidies up.

    Called when the interpreter ends, and by tests. A second call does nothing.
    """
    global _own
    own, _own = _own, None
    if own is None:
        return
    error = _error()
    if error is None:
        _native.note_ending("exited", "")
    else:
        last_words.announce(error)
    if (job := own.directory) is not None:
        # Whoever gets it alone is the last. A process that is killed leaves it to the others, or to
        # the bound on old jobs; so does one that ends without Python's clean-up.
        _leave(job, remove=not own.launched and job.claim() and _all_well(job, own.world_size))


def _leave(job: Directory, *, remove: bool) -> None:
    if not remove:
        job.close()
        return
    try:
        job.remove()
    except OSError as error:
        _log.warning("phalanx: %s", error)


def _all_well(job: Directory, world_size: int) -> bool:
    try:
        boxes = [read_box(job, name, 1) for name in job.boxes().values()]
    except (OSError, ValueError):  # a box that can't be read is a reason to keep it
        return False
    return len(boxes) >= world_size and ended_well(boxes)


def _error() -> BaseException | None:
    """The exception that ends this process, where the interpreter doesn't say it by its hook.

    multiprocessing calls its clean-up while the exception is on its way, and so does
    torch.multiprocessing, which turns it into `sys.exit(1)`.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else error.__context__ or error
    return error


def _job(store: Store, rank: int, size: int) -> _Job:
    try:
        attempt = env.integer("TORCHELASTIC_RESTART_COUNT", minimum=0) or 0
        settings = env.jobs_directory(), env.jobs_kept(), env.job()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if _initialized():
        # A group of some ranks, in a job whose default group is another backend's.
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        store, rank, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    return _Job(store, rank, size, attempt, *settings)


def _initialized() -> bool:
    import torch.distributed as dist

    return bool(dist.is_initialized())


def _open(job: _Job) -> _Own:
    directory = None
    try:
        directory, is_first = _enter(job)
        if directory is not None:
            if is_first:
                directory.describe(description(directory.name, job.world_size))
                prune(directory.base, job.kept)
            _open_file(directory, job)
    except OSError as error:
        _warn(job, error)
        if directory is not None:
            # Of a job of one rank. Of others somebody may be on the way to this directory.
            _leave(directory, remove=job.name is None and job.world_size == 1)
            directory = None
    if directory is None:
        _open_memory(job)
    if multiprocessing.parent_process() is not None:  # it ends without atexit
        multiprocessing.util.Finalize(None, close, exitpriority=-1)
    return _Own(directory, job.name is not None, job.world_size)


def _enter(job: _Job) -> tuple[Directory | None, bool]:
    """Open the job's directory, None if it has none; and whether this rank is to describe it."""
    if job.name is not None:
        named = None if job.name == env.NO_JOB else _held(_launched(job.base, job.name))
        return named, False
    own = os.path.join(job.base, new_name())
    agreed = own if job.world_size == 1 else job.store.compare_set(_KEY, "", own).decode()
    if agreed == env.NO_JOB:
        return None, False
    base, name = os.path.split(agreed)
    if not env.JOB_NAME.fullmatch(name):
        raise OSError(f"the other ranks say that the job is at {agreed!r}, which is no such place")
    return _held(Directory(base, name, create=True)), agreed == own


def _launched(base: str, name: str) -> Directory:
    try:
        return Directory(base, name)
    except FileNotFoundError:
        raise Refused(
            f"there is no job {name} in {base}, which PHALANX_JOB names: unset it, unless a "
            "launcher has set it"
        ) from None


def _held(directory: Directory) -> Directory:
    try:
        directory.hold()
    except OSError:
        directory.close()
        raise
    return directory


def _open_file(directory: Directory, job: _Job) -> None:
    """Make the box's file; all of its blocks at once, so that a full disk shows here."""
    name = f"{os.getpid()}.box"
    try:
        descriptor = directory.create(name)
    except FileExistsError:  # of a dead process whose pid has come round, or of this one's past
        os.unlink(name, dir_fd=directory.fd)
        descriptor = directory.create(name)
    try:
        os.posix_fallocate(descriptor, 0, _native.black_box_bytes())
        _adopt(descriptor, job, directory.name)
    except OSError:
        os.close(descriptor)
        os.unlink(name, dir_fd=directory.fd)
        raise


def _open_memory(job: _Job) -> None:
    descriptor = os.memfd_create("phalanx-box", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, _native.black_box_bytes())
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    _adopt(descriptor, job, "")


def _adopt(descriptor: int, job: _Job, name: str) -> None:
    """Make a file the box of this process; the core keeps the descriptor."""
    host = os.uname().nodename
    _native.open_black_box(descriptor, job.rank, job.world_size, job.attempt, host, name)


def _warn(job: _Job, error: OSError) -> None:
    if job.world_size == 1 or job.store.add(_WARNED, 1) == 1:
        _log.warning(
            "phalanx: rank %d keeps its black box in memory only, so `phalanx explain` and "
            "`phalanx watch` can't read it; the job goes on: %s",
            job.rank,
            error,
        )


def _step(step: SupportsIndex) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < 2**63:
        raise UsageError(f"report: step is {step!r}, expected an integer from 0 up to 2^63 - 1")
    return number


def _loss(loss: SupportsFloat) -> float:
    try:
        if isinstance(loss, bool | str | bytes | bytearray):
            raise TypeError
        # Of a tensor or an array; float() of a tensor that has a gradient would warn.
        item = getattr(loss, "item", None)
        return float(loss if item is None else item())
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(
            f"report: loss is {_shown(loss)}, expected a number or a tensor of one element"
        ) from None


def _check_note(note: str) -> None:
    if not isinstance(note, str):
        raise UsageError(f"report: note is {_shown(note)}, expected a text")
    try:
        note.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"report: note is {_shown(note)}, which has half of a surrogate pair and is no text"
        ) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _say_once() -> None:
    global _silent  # noqa: PLW0603
    if not _silent:
        _silent = True
        _log.warning(
            "phalanx: report() does nothing in this process, which has no group of the backend "
            '"phalanx" yet'
        )


def _in_child() -> None:
    # The box is the parent's; a child that forms a group gets one of its own. (The directory closes
    # itself, see there.)
    global _own, _lock
    _own, _lock = None, threading.Lock()
    _native.forget_black_box()


os.register_at_fork(after_in_child=_in_child)
