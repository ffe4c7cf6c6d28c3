"""The failure drill: run a function on ranks, inject faults and report how each rank ends."""

from __future__ import annotations

import contextlib
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch.distributed as dist

from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.store import HOST, host_store
from phalanx.testing.faults import Fault, check
from phalanx.testing.fork_server import Task
from phalanx.testing.processes import Ended, ForkServer, Ranks

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Drill", "Result"]

# Seconds between two checks of stopped ranks.
_TICK = 0.002


@dataclass(frozen=True)
class Result(Sequence[Ended]):
    """The result of a drill: a sequence of `Ended`, one for each rank.

    Attributes:
        ended: The ends of the ranks, in rank order.
        faults: The planned faults.
    """

    ended: tuple[Ended, ...]
    faults: tuple[Fault, ...] = ()

    def __getitem__(self, rank: Any) -> Any:
        return self.ended[rank]

    def __len__(self) -> int:
        return len(self.ended)

    def __iter__(self) -> Iterator[Ended]:
        return iter(self.ended)

    @property
    def values(self) -> dict[int, Any]:
        """The return values of the function, by rank, for ranks that returned and ended well."""
        return {rank.rank: rank.value for rank in self.ended if rank.returned}

    @property
    def errors(self) -> dict[int, BaseException]:
        """The exceptions that the function raised, by rank."""
        return {rank.rank: rank.error for rank in self.ended if rank.error is not None}

    @property
    def struck(self) -> dict[Fault, float]:
        """The faults that happened, with their times in monotonic seconds."""
        times = {n: when for rank in self.ended for n, when in rank.struck.items()}
        return {fault: times[n] for n, fault in enumerate(self.faults) if n in times}

    @property
    def missed(self) -> list[Fault]:
        """The faults that did not happen."""
        happened = {n for rank in self.ended for n in rank.struck}
        return [fault for n, fault in enumerate(self.faults) if n not in happened]

    def __str__(self) -> str:
        """Return a description of each rank's end, with its traceback or its output."""
        return "\n".join(str(rank) for rank in self.ended)


class Drill:
    """A runner of functions on ranks, with faults injected into some of the ranks.

    The ranks are forked from a fork server, a process that has imported torch. The fork server
    lives as long as the drill, so one drill serves many runs. Use the drill as a context manager,
    or call `close()`.

    Args:
        preload: Further modules that the fork server imports, so that the ranks need not: those
            that your function uses, except modules that start threads when they are imported.

    Example:
        >>> with Drill() as drill:
        ...     result = drill.run(train, 4, faults=[kill(rank=2, at=7)])
        >>> result.errors[0]
        PeerLost('[rank 0/4 on node-a] all_reduce #7 ...: rank 2 (pid 812) was killed by SIGKILL')
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._server = ForkServer(preload)

    def __enter__(self) -> Drill:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server. A second call does nothing."""
        self._server.close()

    def run(
        self,
        fn: Callable[..., object],
        ranks: int,
        args: Sequence[Any] = (),
        *,
        kwargs: Mapping[str, Any] | None = None,
        faults: Sequence[Fault] = (),
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        may_miss: bool = False,
    ) -> Result:
        """Run `fn(*args, **kwargs)` on `ranks` processes and return how each of them ended.

        Each rank is a process with the environment that `phalanx.launch` sets, so `phalanx.init()`
        or `torch.distributed.init_process_group(backend)` in `fn` forms their group. A rank that
        fails does not end the others, so that a drill shows how they react. Blocks until all ranks
        have ended; no process is left then, not even one that a rank has started. `phalanx jobs`
        does not list drills.

        Faults apply to operations of groups of Phalanx, regardless of the caller: your code, DDP
        or functional collectives. Operations of other backends are not counted, so no fault
        applies to them.

        Args:
            fn: The function that each rank runs. Cloudpickle serializes the function, its
                arguments, its result and its exception.
            ranks: Number of ranks.
            args: Positional arguments, the same for every rank.
            kwargs: Keyword arguments, the same for every rank.
            faults: Faults to inject: `kill`, `crash`, `fail`, `stop`, `delay`, `skip`.
            timeout: Seconds until ranks that still run are killed.
            env: Environment variables for the ranks.
            may_miss: Whether to accept that a fault does not happen because its rank ends before.

        Raises:
            UsageError: An argument is invalid; `fn` or a fault can't be pickled; or a fault did
                not happen.
            LaunchError: Ranks still ran after `timeout`. They have been killed, and the message
                contains the stacks of their threads.
        """
        _check(fn, ranks, args, timeout)
        check(faults, ranks)
        planned = _pickled(faults)
        try:
            call = cloudpickle.dumps((_run, (fn, args, kwargs or {}), {}))
        except Exception as error:
            raise UsageError(
                f"the call can't be pickled, so no rank can get it: {error}"
            ) from error
        with tempfile.TemporaryDirectory(prefix="phalanx-drill-") as folder:
            store = host_store()
            # Intended failures must not evict the records of real jobs. A drill is also no part of
            # the job that this process may be a rank of.
            own = {"PHALANX_JOBS_DIR": f"{folder}/jobs", "PHALANX_JOB": ""}
            given = {**own, **(env or {})}
            places = [_environment(rank, ranks, store.port) for rank in range(ranks)]
            tasks = [
                Task(call, folder, rank, {**place, **given}, planned)
                for rank, place in enumerate(places)
            ]
            result = _carry_out(self._server.start(tasks), tuple(faults), timeout)
        if result.missed and not may_miss:
            raise UsageError(_missed(result))
        return result


def _pickled(faults: Sequence[Fault]) -> bytes:
    """Return the faults, pickled by cloudpickle: ranks can't import the user's script."""
    for fault in faults:
        try:
            pickle.loads(cloudpickle.dumps(fault))  # a class with its own __init__ may fail here
        except Exception as error:
            raise UsageError(
                f"{fault} can't be pickled, so its rank can't get it: {error}"
            ) from error
    data: bytes = cloudpickle.dumps(tuple(faults))
    return data


def _run(fn: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Run `fn` in a rank, then destroy a group that it left open, as `phalanx.launch` does."""
    value = fn(*args, **kwargs)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _carry_out(running: Ranks, faults: tuple[Fault, ...], timeout: float) -> Result:
    deadline = time.monotonic() + timeout
    try:
        stops = [(n, fault) for n, fault in enumerate(faults) if fault.name == "stop"]
        hung = _wait(running, stops, deadline)
        running.end(hung)
    except BaseException:
        running.collect()
        raise
    result = Result(tuple(running.collect(hung)), faults)
    if hung:
        names = ", ".join(map(str, hung))
        raise LaunchError(f"after {timeout:g} s these ranks still ran: {names}\n{result}")
    return result


def _wait(running: Ranks, stops: list[tuple[int, Fault]], deadline: float) -> list[int]:
    """Wait for the ranks, resume stopped ranks in time, and return the ranks that hang.

    Ranks that are stopped for good do not hang. The wait ends when only such ranks are left.
    """
    waiting, left = list(range(len(running.pids))), stops
    while waiting and time.monotonic() < deadline:
        left = [(n, fault) for n, fault in left if not _continued(running, n, fault)]
        step = _TICK if left else deadline - time.monotonic()
        waiting = running.wait(step, waiting)
        lasting = {fault.rank for n, fault in left if _stopped_for_good(running, n, fault)}
        if lasting >= set(waiting):
            return []
    return waiting


def _continued(running: Ranks, number: int, fault: Fault) -> bool:
    since = running.struck(fault.rank).get(number)
    if since is None or fault.resume is None or time.monotonic() < since + fault.resume:
        return False
    if not _is_stopped(running.pids[fault.rank]):
        return False  # SIGCONT before the rank has stopped would have no effect
    with contextlib.suppress(ProcessLookupError):
        running.signal(fault.rank, signal.SIGCONT)
    return True


def _stopped_for_good(running: Ranks, number: int, fault: Fault) -> bool:
    return (
        fault.resume is None
        and number in running.struck(fault.rank)
        and _is_stopped(running.pids[fault.rank])
    )


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, which must not have been reaped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _check(fn: object, ranks: object, args: object, timeout: object) -> None:
    if not callable(fn):
        raise UsageError(f"fn is {fn!r}: expected a function; write drill.run(fn, ranks)")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise UsageError(f"ranks is {ranks!r}: expected an integer, at least 1")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise UsageError(f"args is {args!r}: expected a tuple; for one argument write args=(x,)")
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise UsageError(f"timeout is {timeout!r}: expected seconds greater than 0")


def _missed(result: Result) -> str:
    lines = [
        f"{fault} didn't happen: rank {fault.rank} made {_made(result[fault.rank], fault.of)}"
        for fault in result.missed
    ]
    hint = "Plan it earlier, or accept that with may_miss=True. How the ranks ended:"
    return "\n".join([*lines, hint, str(result)])


def _made(rank: Ended, of: str) -> str:
    count = sum(of in ("", name) for name in rank.operations)
    what = f"{of} operations" if of else "operations in groups of Phalanx"
    return f"{count} {what}"
