"""This process's flight recorder: created for its first group, completed when the process ends.

A process has one recorder during its lifetime, whatever groups it forms. The native core writes
most of it; this module adds training progress and how the process ends.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import multiprocessing.util
import operator
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat, SupportsIndex

from phalanx import _native, env
from phalanx.recorder import exception_hook
from phalanx.recorder.job_directory import (
    MAX_TRACEBACK_SIZE,
    JobDirectory,
    UnusableFileError,
    get_recorder_name,
    get_traceback_name,
    make_job_name,
    prune,
)
from phalanx.recorder.recorder_file import ended_well, read_recorder
from phalanx.system.escape import encodable
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

_KEY = "phalanx/job"
_WARNED = "phalanx/job/warned"
_log = logging.getLogger("phalanx")
_lock = threading.Lock()


class _Recorder(NamedTuple):
    """The location of this process's recorder, and whether the job has a launcher."""

    directory: JobDirectory | None
    """The job's directory; None if the recorder is in memory only."""
    has_launcher: bool
    world_size: int


class _JobSettings(NamedTuple):
    """Properties of the job that are known before this process has a recorder."""

    store: Store
    rank: int
    world_size: int
    attempt: int
    base: str
    kept: tuple[int, int]
    name: str | None
    """The value of `PHALANX_JOB`; None if it is unset."""


_recorder: _Recorder | None = None
_has_warned = False
_note = ""


def open_for_group(store: Store, rank: int, size: int) -> None:
    """Ensure that this process has a flight recorder before it joins a group.

    The job is the one named by the launcher. Without a launcher, the ranks agree on a job through
    the store: the first rank to arrive chooses the directory, and no rank waits for another. If no
    file can be created, the recorder is in memory and is lost with the process, and one rank logs a
    warning.

    Args:
        store: The group's store; keys begin with "phalanx/".
        rank: The rank of this process in the group.
        size: The world size of the group.

    Raises:
        UsageError: An environment variable is malformed.
    """
    with _lock:
        if _recorder is None:
            if _is_initialized():
                # A subgroup in a job whose default group uses another backend.
                import torch.distributed as dist

                from phalanx.torch_versions import default_store

                store, rank, size = default_store(), dist.get_rank(), dist.get_world_size()
            _open(store, rank, size)
        elif size > 1 and not _is_initialized():
            # Processes that are new in this group read the job's location from the store.
            publish_job(store)


def publish_job(store: Store) -> None:
    """Publish the location of this process's job in a store, if it has a job without a launcher."""
    if _recorder is not None and not _recorder.has_launcher:
        directory = _recorder.directory
        store.compare_set(_KEY, "", directory.path if directory else env.NO_JOB)


def open_for_workers(store: Store, rank: int, size: int) -> None:
    """Ensure that an RPC worker has a recorder; all workers must have called `publish_job` before.

    Args:
        store: The workers' store; keys begin with "phalanx/".
        rank: The id of this worker.
        size: The number of workers.

    Raises:
        UsageError: An environment variable is malformed.
    """
    with _lock:
        if _recorder is None:
            _open(store, rank, size)


def report(
    *,
    step: SupportsIndex | None = None,
    loss: SupportsFloat | None = None,
    note: str | None = None,
) -> None:
    """Report training progress to `phalanx watch`, `phalanx explain` and `phalanx trace`.

    The report is written to this process's flight recorder, which takes about a microsecond.
    Nothing is sent, and the call does not block, except to fetch the value of a loss from a GPU.
    Without a group of the backend "phalanx", the call only logs a warning, once.

    Args:
        step: The number of the training step, not negative.
        loss: The loss as a number or a tensor of one element. NaN and infinity are shown as such.
        note: The rank's current activity, such as "evaluating", which remains until the next note.
            It is truncated to 255 bytes of UTF-8.

    Raises:
        UsageError: No argument was given, or an argument is invalid.

    Example:
        >>> for step, batch in enumerate(batches):
        ...     loss = train(batch)
        ...     phalanx.report(step=step, loss=loss)
    """
    number = -1 if step is None else _check_step(step)
    value = None if loss is None else _check_loss(loss)
    global _note  # noqa: PLW0603
    if note is not None:
        _check_note(note)
        _note = note
    elif step is None and loss is None:
        raise UsageError("report: no argument was given, expected step, loss or note")
    if _recorder is None:
        _warn_once()
    else:
        _native.report(number, value, _note)


def get_job_directory() -> JobDirectory | None:
    """Return the directory of this process's job; None without a flight recorder in a file."""
    return None if _recorder is None else _recorder.directory


def get_job_name() -> str | None:
    """Return the name of this process's job; None without a flight recorder in a file."""
    directory = get_job_directory()
    return None if directory is None else directory.name


def close() -> None:
    """Record that this process ends; the last process of a job without a launcher cleans up.

    Called at the exit of the interpreter, and by tests. A second call does nothing.
    """
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is None:
        return
    error = _find_fatal_error()
    if error is None:
        _native.record_ending("exited", "")
    else:
        exception_hook.announce(error)
    if (job := recorder.directory) is None:
        return
    # The process that gets the exclusive lock is the last one. A process that is killed, or that
    # exits without Python's cleanup, leaves the removal to the others or to `prune`.
    is_last = not recorder.has_launcher and job.lock_exclusive()
    if is_last and _have_all_ended_well(job, recorder.world_size):
        job.discard()
    else:
        job.close()


def _have_all_ended_well(job: JobDirectory, world_size: int) -> bool:
    try:
        recorders = [read_recorder(job, name, 1) for name in job.list_recorders().values()]
    except (OSError, ValueError):  # an unreadable recorder is worth keeping
        return False
    return len(recorders) >= world_size and ended_well(recorders)


def _find_fatal_error() -> BaseException | None:
    """Return the exception that ends this process, if its hook has not announced it.

    multiprocessing runs its cleanup while the exception propagates, and so does
    torch.multiprocessing, which converts the exception to `sys.exit(1)`. The hook itself can be
    interrupted before its first line, by a signal handler that raises, as DataLoader's of SIGCHLD.
    """
    error = sys.exc_info()[1]
    if error is None and not exception_hook.is_interactive():
        error = getattr(sys, "last_value", None)  # the interpreter has printed it
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else error.__context__ or error
    return error


def _open(store: Store, rank: int, size: int) -> None:
    global _recorder  # noqa: PLW0603
    try:
        attempt = env.integer("TORCHELASTIC_RESTART_COUNT", minimum=0) or 0
        settings = env.jobs_directory(), env.jobs_kept(), env.job()
    except ValueError as error:
        raise UsageError(str(error)) from None
    _recorder = _open_recorder(_JobSettings(store, rank, size, attempt, *settings))
    # Installed now because failing to form a group may also end the process.
    exception_hook.install(_keep_traceback, partial(_find_first_rank, rank, attempt))


def _keep_traceback(text: str) -> bool:
    """Write a whole traceback to the job's directory; return whether that succeeded."""
    if (directory := get_job_directory()) is None:
        return False
    content = encodable(text).encode()[-MAX_TRACEBACK_SIZE:]
    try:
        directory.replace(get_traceback_name(os.getpid()), content)
    except OSError:  # a full disk, or the job's directory was removed
        return False
    return True


def _find_first_rank(rank: int, attempt: int, text: str) -> str:
    """Return the rank of this host that has had an exception with this text before, else "".

    The ranks of a host agree by a file in the job's directory, if there is one.
    """
    if (directory := get_job_directory()) is None:
        return ""
    digest = hashlib.sha256(f"{attempt} {encodable(text)}".encode()).hexdigest()
    try:
        first = directory.create_once(f"{digest[:32]}.first", str(rank).encode()).decode()
    except OSError:  # a full disk, or the job's directory was removed
        return ""
    return "" if first == str(rank) else first


def _is_initialized() -> bool:
    import torch.distributed as dist

    return bool(dist.is_initialized())


def _open_recorder(job: _JobSettings) -> _Recorder:
    directory = None
    try:
        directory, is_first = _open_directory(job)
        if directory is not None:
            if is_first:
                host = _find_store_host(job.store)
                directory.write_description(job.world_size, store_host=host)
                prune(directory.base, job.kept)
            _open_file(directory, job)
    except OSError as error:
        _warn(job, error)
        if directory is not None:
            # Removed only for a single rank: other ranks may be about to open the directory.
            is_unused = job.name is None and job.world_size == 1
            (directory.discard if is_unused else directory.close)()
            directory = None
    if directory is None:
        _open_memory(job)
    if multiprocessing.parent_process() is not None:  # a child process exits without atexit
        multiprocessing.util.Finalize(None, close, exitpriority=-1)
    return _Recorder(directory, job.name is not None, job.world_size)


def _find_store_host(store: Any) -> int | None:
    """Return the rank that hosts the store: 0 with PyTorch's `env://`; None if it is unknown."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    is_named = str(getattr(store, "port", "")) == os.environ.get("MASTER_PORT")
    return 0 if is_named and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" else None


def _open_directory(job: _JobSettings) -> tuple[JobDirectory | None, bool]:
    """Open the job's directory, or None; also return whether this rank must describe the job."""
    if job.name == env.NO_JOB:
        return None, False
    if job.name is not None:
        return _lock_shared(_open_launched_directory(job.base, job.name)), False
    own = os.path.join(job.base, make_job_name())
    agreed = own if job.world_size == 1 else job.store.compare_set(_KEY, "", own).decode()
    if agreed == env.NO_JOB:
        return None, False
    base, name = os.path.split(agreed)
    if not env.JOB_NAME.fullmatch(name):
        raise OSError(f"the other ranks use the job directory {agreed!r}, whose name is invalid")
    return _lock_shared(JobDirectory(base, name, create=True)), agreed == own


def _open_launched_directory(base: str, name: str) -> JobDirectory:
    try:
        return JobDirectory(base, name)
    except FileNotFoundError:
        raise UnusableFileError(
            f"PHALANX_JOB names the job {name}, which does not exist in {base}: unset it, unless a "
            "launcher set it"
        ) from None


def _lock_shared(directory: JobDirectory) -> JobDirectory:
    try:
        directory.lock_shared()
    except OSError:
        directory.close()
        raise
    return directory


def _open_file(directory: JobDirectory, job: _JobSettings) -> None:
    """Create the recorder's file and allocate all of its blocks, so that a full disk fails here."""
    name = get_recorder_name(os.getpid())
    try:
        descriptor = directory.create(name)
    except FileExistsError:  # from a dead process with the same pid, or an earlier recorder
        os.unlink(name, dir_fd=directory.fd)
        descriptor = directory.create(name)
    try:
        os.posix_fallocate(descriptor, 0, _native.flight_recorder_bytes())
        _adopt(descriptor, job, directory.name)
    except OSError:
        os.close(descriptor)
        os.unlink(name, dir_fd=directory.fd)
        raise


def _open_memory(job: _JobSettings) -> None:
    size = _native.flight_recorder_bytes()
    descriptor = _native.create_sealed_memory("phalanx-recorder", size)
    os.posix_fallocate(descriptor, 0, size)
    _adopt(descriptor, job, "")


def _adopt(descriptor: int, job: _JobSettings, name: str) -> None:
    """Use a file as the recorder of this process; the native core takes over the descriptor."""
    host = os.uname().nodename
    _native.open_flight_recorder(descriptor, job.rank, job.world_size, job.attempt, host, name)


def _warn(job: _JobSettings, error: OSError) -> None:
    if job.world_size == 1 or job.store.add(_WARNED, 1) == 1:
        _log.warning(
            "phalanx: rank %d keeps its flight recorder in memory only, so that `phalanx explain` "
            "and `phalanx watch` cannot read it; the job continues: %s",
            job.rank,
            error,
        )


def _check_step(step: SupportsIndex) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < 2**63:
        raise UsageError(f"report: step is {step!r}, expected an integer from 0 up to 2^63 - 1")
    return number


def _check_loss(loss: SupportsFloat) -> float:
    try:
        if isinstance(loss, bool | str | bytes | bytearray):
            raise TypeError
        # Tensors and arrays have item(); float() of a tensor that requires grad would warn.
        item = getattr(loss, "item", None)
        return float(loss if item is None else item())
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(
            f"report: loss is {_shorten_repr(loss)}, expected a number or a tensor of one element"
        ) from None


def _check_note(note: str) -> None:
    if not isinstance(note, str):
        raise UsageError(f"report: note is {_shorten_repr(note)}, expected a string")
    try:
        note.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"report: note is {_shorten_repr(note)}, "
            "which contains a lone surrogate and cannot be encoded"
        ) from None


def _shorten_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _warn_once() -> None:
    global _has_warned  # noqa: PLW0603
    if not _has_warned:
        _has_warned = True
        _log.warning(
            "phalanx: report() does nothing in this process, which has no group of the backend "
            '"phalanx" yet'
        )


def _in_child() -> None:
    # The recorder is the parent's; a child that forms a group gets a recorder of its own.
    # (`job_directory` closes the inherited directory.)
    global _recorder, _lock
    _recorder, _lock = None, threading.Lock()
    _native.detach_flight_recorder()


os.register_at_fork(after_in_child=_in_child)
