"""Fault injection: run a function on ranks, inject faults and report how each rank ends."""

from __future__ import annotations

import contextlib
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.store import host_store, rank_variables
from phalanx.system import pickling
from phalanx.testing.faults import Fault, check_faults
from phalanx.testing.fork_server import Task
from phalanx.testing.processes import ForkServer, RankProcesses, RankResult

# Seconds between two checks of stopped ranks.
_TICK = 0.002


@dataclass(frozen=True)
class Result(Sequence[RankResult]):
    """The result of a run: a sequence of `RankResult`, one for each rank.

    Attributes:
        ranks: The results of the ranks, in rank order.
        faults: The planned faults.

    Example:
        >>> result = runner.run(train, 2, faults=[kill(rank=1, nth=3)])
        >>> result.values  # rank 0 raised PeerLost, and rank 1 was killed
        {}
        >>> print(result[1])
        rank 1 (pid ...) was killed by SIGKILL
        >>> result.missed_faults
        []
    """

    ranks: tuple[RankResult, ...]
    faults: tuple[Fault, ...] = ()

    def __getitem__(self, rank: Any) -> Any:
        return self.ranks[rank]

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def values(self) -> dict[int, Any]:
        """The return values of the function, by rank, for ranks that returned and ended well."""
        return {rank.rank: rank.value for rank in self.ranks if rank.returned}

    @property
    def errors(self) -> dict[int, BaseException]:
        """The exceptions that the function raised, by rank."""
        return {rank.rank: rank.error for rank in self.ranks if rank.error is not None}

    @property
    def fault_times(self) -> dict[Fault, float]:
        """The faults that happened, with their times in monotonic seconds."""
        times = {n: when for rank in self.ranks for n, when in rank.fault_times.items()}
        return {fault: times[n] for n, fault in enumerate(self.faults) if n in times}

    @property
    def missed_faults(self) -> list[Fault]:
        """The faults that did not happen."""
        happened = {n for rank in self.ranks for n in rank.fault_times}
        return [fault for n, fault in enumerate(self.faults) if n not in happened]

    def __str__(self) -> str:
        """Return a description of each rank's end, with its traceback or its output."""
        return "\n".join(str(rank) for rank in self.ranks)


class FaultRunner:
    """A runner of functions on ranks, with faults injected into some of the ranks.

    The ranks are forked from a fork server, a process that has imported torch. The fork server
    lives as long as the runner, so one runner serves many runs. Use the runner as a context
    manager, or call `close()`.

    Args:
        preload: Further modules that the fork server imports, so that the ranks need not: those
            that your function uses, except modules that start threads when they are imported.

    Example:
        >>> with FaultRunner() as runner:
        ...     result = runner.run(train, 4, faults=[kill(rank=2, nth=7)])
        >>> result.errors[0]
        PeerLost('[rank 0/4 on ...] all_reduce #7 ...: rank 2 (pid ...) was killed by SIGKILL...')
        >>> result.errors[0].ranks
        (2,)
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._server = ForkServer(preload)

    def __enter__(self) -> FaultRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server. A second call does nothing."""
        self._server.close()

    def run(
        self,
        fn: Callable[..., object],
        nprocs: int,
        args: Sequence[Any] = (),
        *,
        kwargs: Mapping[str, Any] | None = None,
        faults: Sequence[Fault] = (),
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        allow_missed: bool = False,
    ) -> Result:
        """Run `fn(*args, **kwargs)` in `nprocs` processes and return how each of them ended.

        Each rank is a process with the environment that `phalanx.launch` sets, so `phalanx.init()`
        or `torch.distributed.init_process_group(backend)` in `fn` forms their group. A rank that
        fails does not end the others, so that a test sees how they react. Blocks until all ranks
        have ended; no process is left then, not even one that a rank has started. `phalanx jobs`
        does not list these runs.

        Faults apply to operations of groups of Phalanx, regardless of the caller: your code, DDP
        or functional collectives. Operations of other backends are not counted, so no fault
        applies to them.

        Args:
            fn: The function that each rank runs. Cloudpickle serializes the function, its
                arguments, its result and its exception.
            nprocs: Number of ranks.
            args: Positional arguments, the same for every rank.
            kwargs: Keyword arguments, the same for every rank.
            faults: Faults to inject: `kill`, `crash`, `fail`, `stop`, `delay`, `skip`.
            timeout: Seconds until ranks that still run are killed.
            env: Environment variables for the ranks.
            allow_missed: Whether to accept that a fault does not happen because its rank ends
                earlier.

        Raises:
            UsageError: An argument is invalid; `fn` or a fault can't be pickled; or a fault did
                not happen.
            LaunchError: Ranks still ran after `timeout`. They have been killed, and the message
                contains the stacks of their threads.

        Example:
            >>> result = runner.run(train, 2, args=(1e-3,), faults=[delay(0, nth=5, seconds=1)])
            >>> [rank.code for rank in result]
            [0, 0]
        """
        _check_arguments(fn, nprocs, args, timeout)
        check_faults(faults, nprocs)
        planned = _pickle_faults(faults)
        try:
            call = pickling.dumps((_run, (fn, args, kwargs or {}), {}))
        except Exception as error:
            raise UsageError(f"can't pickle the call to send it to the ranks: {error}") from error
        with tempfile.TemporaryDirectory(prefix="phalanx-faults-") as folder:
            store = host_store()
            # Intended failures must not evict the records of real jobs. Nor do the ranks belong
            # to the job that this process may be a rank of.
            isolation = {"PHALANX_JOBS_DIR": f"{folder}/jobs", "PHALANX_JOB": ""}
            variables = {**isolation, **(env or {})}
            environments = [rank_variables(rank, nprocs, store.port) for rank in range(nprocs)]
            tasks = [
                Task(call, folder, rank, {**environment, **variables}, planned)
                for rank, environment in enumerate(environments)
            ]
            result = _supervise(self._server.start(tasks), tuple(faults), timeout)
        if result.missed_faults and not allow_missed:
            raise UsageError(_describe_missed(result))
        return result


def _pickle_faults(faults: Sequence[Fault]) -> bytes:
    """Return the faults, pickled by cloudpickle: ranks can't import the user's script."""
    for fault in faults:
        try:
            pickle.loads(pickling.dumps(fault))  # a class with its own __init__ may fail here
        except Exception as error:
            raise UsageError(f"can't pickle {fault} to send it to its rank: {error}") from error
    return pickling.dumps(tuple(faults))


def _run(fn: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Run `fn` in a rank, then destroy a group that it leaves open, as `phalanx.launch` does."""
    value = fn(*args, **kwargs)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _supervise(processes: RankProcesses, faults: tuple[Fault, ...], timeout: float) -> Result:
    deadline = time.monotonic() + timeout
    try:
        stops = [(n, fault) for n, fault in enumerate(faults) if fault.name == "stop"]
        hung = _wait(processes, stops, deadline)
        processes.kill(hung)
    except BaseException:
        processes.collect()
        raise
    result = Result(tuple(processes.collect(hung)), faults)
    if hung:
        names = ", ".join(map(str, hung))
        raise LaunchError(
            f"ranks {names} were still running after {timeout:g} s\n{result}",
            ranks=hung,
            seconds=timeout,
        )
    return result


def _wait(processes: RankProcesses, stops: list[tuple[int, Fault]], deadline: float) -> list[int]:
    """Wait for the ranks, resume stopped ranks in time, and return the ranks that hang.

    Ranks that are stopped for good do not hang. The wait ends when only such ranks are left.
    """
    running, pending = list(range(len(processes.pids))), stops
    while running and time.monotonic() < deadline:
        pending = [(n, fault) for n, fault in pending if not _resume_if_due(processes, n, fault)]
        step = _TICK if pending else deadline - time.monotonic()
        running = processes.wait(step, running)
        stopped = {fault.rank for n, fault in pending if _is_stopped_for_good(processes, n, fault)}
        if stopped >= set(running):
            return []
    return running


def _resume_if_due(processes: RankProcesses, number: int, fault: Fault) -> bool:
    since = processes.fault_times(fault.rank).get(number)
    if since is None or fault.resume_after is None or time.monotonic() < since + fault.resume_after:
        return False
    if not _is_stopped(processes.pids[fault.rank]):
        return False  # SIGCONT before the rank has stopped would have no effect
    with contextlib.suppress(ProcessLookupError):
        processes.signal(fault.rank, signal.SIGCONT)
    return True


def _is_stopped_for_good(processes: RankProcesses, number: int, fault: Fault) -> bool:
    return (
        fault.resume_after is None
        and number in processes.fault_times(fault.rank)
        and _is_stopped(processes.pids[fault.rank])
    )


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, which must not have been reaped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _check_arguments(fn: object, nprocs: object, args: object, timeout: object) -> None:
    if not callable(fn):
        raise UsageError(f"fn is {fn!r}: expected a function; write runner.run(fn, nprocs)")
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise UsageError(f"nprocs is {nprocs!r}: expected an integer, at least 1")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise UsageError(f"args is {args!r}: expected a tuple; for one argument write args=(x,)")
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise UsageError(f"timeout is {timeout!r}: expected seconds greater than 0")


def _describe_missed(result: Result) -> str:
    lines = [
        f"{fault} was not injected: rank {fault.rank} made "
        f"{_describe_operations(result[fault.rank], fault.operation)}"
        for fault in result.missed_faults
    ]
    hint = "Choose an earlier operation, or pass allow_missed=True. How the ranks ended:"
    return "\n".join([*lines, hint, str(result)])


def _describe_operations(rank: RankResult, operation: str) -> str:
    count = sum(operation in ("", name) for name in rank.operations)
    kind = f"{operation} operations" if operation else "operations in groups of Phalanx"
    return f"{count} {kind}"
