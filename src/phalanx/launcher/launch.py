"""`phalanx.launch`: run a function on several ranks of this machine and return their results.

`RankProcesses` starts, watches and stops the processes of one call, and leaves none. Each of them
runs `phalanx.launcher.worker`.
"""

from __future__ import annotations

import linecache
import operator
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.failures import (
    Failure,
    excerpt,
    find_root_cause,
    may_have_unknown_cause,
    record_exceptions,
)
from phalanx.launcher.host_resources import check_host, rank_defaults
from phalanx.launcher.output_forwarder import Exit, OutputForwarder, Sink
from phalanx.launcher.store import host_store, rank_variables
from phalanx.launcher.worker import InterpreterState, RankOutcome
from phalanx.recorder.launcher_log_writer import LauncherLogWriter
from phalanx.system import pickling
from phalanx.system.notebook import OutputReader, find_cell
from phalanx.system.processes import ChildProcess, signal_group

STOP_TIMEOUT = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped."""

_POLL_SECONDS = 0.1
# The worker takes over the caller's sys.path before it imports anything else. Files in the working
# directory therefore do not shadow the standard library, and phalanx is found as in the caller.
_WORKER = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from phalanx.launcher.worker import main; main()"
)

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    prefix: bool = False,
) -> list[T]:
    """Run `fn(*args, **kwargs)` in `nprocs` new processes on this machine; return all results.

    Each process is one rank with the environment of torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    `MASTER_ADDR`, ...), so `phalanx.init()` or `torch.distributed.init_process_group(backend)` in
    `fn` forms their group. The store for the rendezvous listens on this machine's loopback
    interface, on a free port. The function is pickled by value: it may be defined in a notebook, a
    REPL or a script, which needs no `if __name__ == "__main__"` and is not run again. Each rank
    imports functions of importable modules.

    Blocks until all ranks have ended. Their output appears on this process's `sys.stdout` and
    `sys.stderr`. When a rank fails, the others are stopped: SIGTERM, and SIGKILL 5 seconds later.
    However this call ends, no process is left, even after Ctrl-C or if this process is killed. (The
    kernel ensures it; it watches the calling thread.)

    Args:
        fn: The function for each rank. The function and its arguments must be picklable by
            cloudpickle. So must its result, which is copied to this process.
        nprocs: The number of ranks, at least 1.
        args: The positional arguments, the same for every rank. `RANK` in the environment, or
            `torch.distributed.get_rank()`, distinguishes ranks.
        kwargs: The keyword arguments, the same for every rank.
        timeout: Seconds after which the ranks are stopped and LaunchError is raised; None for no
            limit.
        env: Environment variables for the ranks, in addition to this process's own.
            `OMP_NUM_THREADS` is max(1, usable cores // nprocs) unless either sets it.
        prefix: True to begin every line that a rank prints with `[rank N]`.

    Returns:
        The results of `fn` in rank order.

    Raises:
        UsageError: An argument is invalid; no process was started.
        LaunchError: This host cannot start so many ranks, a rank failed, or the timeout expired.
            After a failure, the message names the rank with the first error and contains its
            traceback. An error that is a consequence of another rank's, such as PeerLost, counts
            as first only if there is no other. `__cause__` is the original exception if it could
            be pickled.

    Example:
        >>> def area(side):
        ...     return int(os.environ["RANK"]) * side
        >>> phalanx.launch(area, 2, (21,))
        [0, 21]
    """
    __tracebackhide__ = True  # pytest and IPython, which shows the last frame all the same
    nprocs = _check_arguments(fn, nprocs, args, kwargs, timeout, env)
    check_host(nprocs)
    deadline = None if timeout is None else time.monotonic() + timeout
    with LauncherLogWriter(nprocs) as launcher_log:
        payload = _write_payload(fn, tuple(args), dict(kwargs or {}))
        with RankProcesses(payload, launcher_log, prefix=prefix) as ranks:
            store, run_id = host_store(), uuid.uuid4().hex
            environ = {**os.environ, **(env or {})}
            environ |= {**rank_defaults(nprocs, environ), **launcher_log.environment()}
            for rank in range(nprocs):
                variables = rank_variables(rank, nprocs, store.port, run_id)
                try:
                    ranks.start({**environ, **variables})
                except OSError as error:
                    raise LaunchError(f"can't start rank {rank}: {error}", ranks=[rank]) from error
            has_finished = ranks.wait(deadline)
        if failures := [failure for failure in ranks.failures if not failure.stopped]:
            cause = find_root_cause(failures)
            # A variable for the exception would be a cycle, which keeps the descriptors of all
            # frames. It is raised here so that a notebook, which never hides the last frame, shows
            # no other frame of Phalanx.
            raise _describe_failure(cause, ranks, launcher_log) from _load_error(
                ranks.outcomes[cause.rank]
            )
        if not has_finished:
            hint, job = _explain_hint(launcher_log, 1)
            raise LaunchError(
                f"timeout: these ranks were still running after {timeout} s and were stopped: "
                f"{_format_ranks(ranks.stopped)}{hint}",
                ranks=ranks.stopped,
                seconds=timeout,
                job=job,
            )
    return [_load_result(rank, outcome) for rank, outcome in enumerate(ranks.outcomes)]


def _check_arguments(
    fn: object, nprocs: object, args: object, kwargs: object, timeout: object, env: object
) -> int:
    __tracebackhide__ = True
    if not callable(fn):
        raise UsageError(f"fn is {fn!r}: expected a function; write phalanx.launch(fn, nprocs)")
    try:
        if isinstance(nprocs, bool):
            raise TypeError
        count = operator.index(nprocs)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"nprocs is {nprocs!r}: expected an integer, at least 1") from None
    if count < 1:
        raise UsageError(f"nprocs is {count}: expected at least 1")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise UsageError(f"args is {args!r}: expected a tuple; for one argument write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(f"kwargs is {kwargs!r}: expected a dictionary of keyword arguments")
    if timeout is not None and not (
        isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0
    ):
        raise UsageError(f"timeout is {timeout!r}: expected seconds greater than 0, or None")
    _check_env(env)
    return count


def _check_env(env: object) -> None:
    __tracebackhide__ = True
    if env is None:
        return
    if not isinstance(env, Mapping):
        raise UsageError(f"env is {env!r}: expected a dictionary of environment variables")
    reserved = {*rank_variables(0, 1, 1, ""), "PHALANX_JOB", "PHALANX_JOBS_DIR"}
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"env has {name!r}: {value!r}; expected strings for both")
        if name in reserved:
            raise UsageError(f"env sets {name}, which phalanx.launch sets for each rank: remove it")


def _write_payload(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Write the interpreter state and the call into a memory file; return its descriptor."""
    __tracebackhide__ = True
    try:
        call = pickling.dumps((fn, args, kwargs))
    except Exception as error:
        raise UsageError(_describe_unpicklable(fn, args, kwargs, error)) from error
    fd = os.memfd_create("phalanx-launch", os.MFD_CLOEXEC)
    with os.fdopen(fd, "wb", closefd=False) as file:
        pickle.dump(InterpreterState(list(sys.argv), _interactive_sources(fn)), file)
        file.write(call)
    return fd


def _describe_unpicklable(
    fn: object, args: tuple[Any, ...], kwargs: dict[str, Any], error: object
) -> str:
    values = {"fn": fn, **{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}
    for name, value in values.items():
        try:
            pickling.dumps(value)
        except Exception as reason:  # noqa: BLE001 - the object's own code can raise anything
            return (
                f"{name} can't be pickled and so can't be sent to the ranks ({reason}): create the "
                "objects that it needs (locks, files, sockets, groups) inside the function"
            )
    return f"the call can't be pickled and so can't be sent to the ranks ({error})"


def _interactive_sources(fn: object) -> dict[str, list[str]]:
    name = getattr(getattr(fn, "__code__", None), "co_filename", None)
    if name is None or os.path.exists(name):
        return {}
    lines = linecache.getlines(name)
    return {name: lines} if lines else {}


def _describe_failure(
    cause: Failure, ranks: RankProcesses, launcher_log: LauncherLogWriter
) -> LaunchError:
    outcome = ranks.outcomes[cause.rank]
    if outcome is not None and outcome.value is None:
        name = outcome.summary.removeprefix("phalanx.errors.")
        parts = [cause.statement or f"rank {cause.rank} (pid {cause.pid}) raised {name}"]
        if cause.text.strip() != outcome.summary:
            parts.append(f"On rank {cause.rank}:\n{cause.text.rstrip()}")
    else:
        parts = [cause.headline + (" after it had returned its result" if outcome else "")]
        if cause.text:
            parts.append(f"The end of its stderr:\n{cause.text}")
    record_exceptions(launcher_log, ranks.failures)
    later = [f.rank for f in ranks.failures if not f.stopped and f is not cause]
    parts += [f"Failed after it: {_format_ranks(later)}."] if later else []
    parts += [f"Stopped by the launcher: {_format_ranks(ranks.stopped)}."] if ranks.stopped else []
    hint, job = _explain_hint(launcher_log, cause.exit_code)
    message = "\n\n".join(parts) + hint
    return LaunchError(message, ranks=cause.late_ranks or [cause.rank], job=job)


def _explain_hint(launcher_log: LauncherLogWriter, code: int) -> tuple[str, str | None]:
    """Return the end of a message and the name of the job, if it has records to explain."""
    if not launcher_log.finish(code):
        return "", None
    hint = f"\n\nTo see what the ranks were doing: phalanx explain {launcher_log.name}"
    return hint, launcher_log.name


def _load_error(outcome: RankOutcome | None) -> BaseException | None:
    if outcome is None or outcome.error is None:
        return None
    try:
        error = pickle.loads(outcome.error)
    except Exception:  # noqa: BLE001 - the message contains its text anyway
        return None
    return error if isinstance(error, BaseException) else None


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _load_result(rank: int, outcome: RankOutcome | None) -> Any:
    __tracebackhide__ = True
    if outcome is None or outcome.value is None:
        raise LaunchError(f"rank {rank} ended without a result", ranks=[rank])
    try:
        return pickle.loads(outcome.value)
    except Exception as error:
        raise LaunchError(
            f"rank {rank}'s result can't be unpickled here: {error}", ranks=[rank]
        ) from error


@dataclass
class _RankProcess:
    process: ChildProcess
    result: int
    """A memory file: it holds a result of any size, and the writer needs no concurrent reader."""


class RankProcesses:
    """A context manager for the ranks; on exit, every rank has ended and has been reaped.

    Attributes:
        outcomes: The outcome of each rank, by rank; None if the rank ended without one. Set on
            exit.
        failures: The failures of ranks, including those of stopped ranks. Set on exit.
        stopped: The ranks that were still running when the ranks were stopped. Set on exit.
    """

    outcomes: list[RankOutcome | None]
    failures: list[Failure]
    stopped: list[int]

    def __init__(self, payload: int, launcher_log: LauncherLogWriter, *, prefix: bool) -> None:
        """Take over the memory file with the pickled call; `start` starts the ranks.

        Args:
            payload: The descriptor of the memory file with the pickled call; closed on exit.
            launcher_log: The job's record of rank starts and exits.
            prefix: True to begin every line of output with the rank.
        """
        self._payload = payload
        self._launcher_log = launcher_log
        self._prefix = prefix
        self._ranks: list[_RankProcess] = []
        self._forwarder = OutputForwarder()
        self._forwarder.on_exit = self._record_exit
        self._sinks = Sink("stdout"), Sink("stderr")
        self._cell = find_cell()
        self._stop_time = float("inf")

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop(signal.SIGTERM, STOP_TIMEOUT)
        finally:  # even if a second Ctrl-C interrupts the wait
            self._stop(signal.SIGKILL, STOP_TIMEOUT)
            self._collect_results()
            self._reap()

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the next rank.

        Raises:
            OSError: The process cannot be created.
        """
        rank = len(self._ranks)
        result = os.memfd_create(f"phalanx-result-{rank}", os.MFD_CLOEXEC)
        outputs = [] if self._cell is None else [*os.pipe()]
        descriptors = (self._payload, result, *outputs[1:])
        try:
            process = ChildProcess(
                self._command(descriptors),
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
            )
        except OSError:
            for fd in (result, *outputs):
                os.close(fd)
            raise
        self._ranks.append(_RankProcess(process, result))
        self._launcher_log.start(rank, process.pid)
        self._forwarder.add_process(rank, process.pid)
        prefix = f"[rank {rank}] " if self._prefix else ""
        out, err = self._sinks
        self._forwarder.add_stream(rank, _detach_pipe(process.stdout), out, prefix, keep=False)
        self._forwarder.add_stream(rank, _detach_pipe(process.stderr), err, prefix, keep=True)
        if self._cell is not None:
            read, write = outputs
            os.close(write)
            self._forwarder.add_stream(rank, read, OutputReader(self._cell), "", keep=False)

    def wait(self, deadline: float | None) -> bool:
        """Wait until all ranks have ended or one has failed.

        After a failure that is a consequence of another one, waits `GRACE` more seconds for the
        cause.

        Args:
            deadline: The monotonic time in seconds at which to give up; None for no limit.

        Returns:
            False if the deadline came first.
        """
        while len(self._forwarder.exits()) < len(self._ranks):
            if (failures := self._failures()) and not may_have_unknown_cause(failures):
                return True
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            self._forwarder.step(
                _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - now)
            )
        return True

    def _command(self, descriptors: Sequence[int]) -> list[str]:
        path = "\n".join(entry or os.getcwd() for entry in sys.path)
        arguments = [str(number) for number in (os.getpid(), *descriptors)]
        return [sys.executable, "-c", _WORKER, *arguments, path]

    def _collect_results(self) -> None:
        exits = self._forwarder.exits()
        self.outcomes = [self._outcome(rank) for rank in range(len(self._ranks))]
        self.failures = self._failures()
        failed = [failure.rank for failure in self.failures if not failure.stopped]
        self.stopped = [
            rank
            for rank in range(len(self._ranks))
            if rank not in failed and (rank not in exits or exits[rank].time > self._stop_time)
        ]

    def _record_exit(self, rank: int, end: Exit) -> None:
        pid = self._ranks[rank].process.pid
        self._launcher_log.end(rank, pid, end.code, stopped=end.time > self._stop_time)

    def _outcome(self, rank: int) -> RankOutcome | None:
        with os.fdopen(self._ranks[rank].result, "rb", closefd=False) as file:
            file.seek(0)
            try:
                outcome: RankOutcome = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the rank died before or during the write
                return None
            return outcome

    def _failures(self) -> list[Failure]:
        failures = []
        for rank, end in self._forwarder.exits().items():
            outcome = self._outcome(rank)
            if end.code == 0 and outcome is not None:
                continue
            text, failed_at = excerpt(self._forwarder.tail(rank)), end.time
            if outcome is not None and outcome.value is None:
                text, failed_at = outcome.traceback, outcome.time
            pid = self._ranks[rank].process.pid
            was_stopped = failed_at > self._stop_time
            failures.append(Failure(rank, pid, end.code or 0, failed_at, text, stopped=was_stopped))
        return failures

    def _alive(self) -> list[int]:
        exits = self._forwarder.exits()
        return [rank for rank in range(len(self._ranks)) if rank not in exits]

    def _stop(self, number: signal.Signals, timeout: float) -> None:
        now = time.monotonic()
        if self._alive():
            self._stop_time = min(self._stop_time, now)
            self._launcher_log.note_suspended(
                (rank, self._ranks[rank].process.pid) for rank in self._alive()
            )
        for rank in self._alive():
            signal_group(self._ranks[rank].process.pid, number)
        while self._alive() and time.monotonic() < now + timeout:
            self._forwarder.step(_POLL_SECONDS)

    def _reap(self) -> None:
        for rank, entry in enumerate(self._ranks):
            signal_group(entry.process.pid, signal.SIGKILL)  # the rank may have left processes
            if rank in self._forwarder.exits():
                entry.process.wait()
        self._forwarder.close()
        for entry in self._ranks:
            os.close(entry.result)
        os.close(self._payload)


def _detach_pipe(pipe: IO[bytes] | None) -> int:
    """Return a descriptor of a pipe that does not belong to the file object, which is closed."""
    if pipe is None:
        raise ValueError("the process was started without this pipe")
    with pipe:
        return os.dup(pipe.fileno())
