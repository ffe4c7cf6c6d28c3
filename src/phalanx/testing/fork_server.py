"""The fork server: it imports torch once and forks the ranks, which need not import it again.

A forked rank is an ordinary process. It has its own pid and session, can be killed, and ends by
reaching the end of this script, so its `atexit` handlers run (unless its task skips
finalization). The server has no threads and no groups that a rank could inherit. Ranks that have
ended stay zombies until the client requests that the server reap them, so that their peers can see
how they ended. The server ends when its client is gone; the kernel then kills the remaining ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.system.processes import signal_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Task:
    """The task of one rank.

    Attributes:
        call: Pickled `(function, arguments, keyword arguments)`.
        folder: Folder of the files for outcome, stdout and stderr.
        rank: Number of the rank, part of the names of these files.
        environment: Environment variables to set.
        faults: Faults of all ranks, pickled by cloudpickle; None to count no operations.
        skips_finalization: Whether to skip Python's finalization after the function has returned.
            Finalization takes longer than most test functions.
    """

    call: bytes
    folder: str
    rank: int
    environment: Mapping[str, str]
    faults: bytes | None = None
    skips_finalization: bool = False

    def file(self, name: str) -> Path:
        """Return the path of a file of this rank."""
        return Path(self.folder, f"{name}-{self.rank}")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a rank: a value or an exception, and its time in monotonic seconds."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    time: float = 0.0


def main() -> None:
    """Serve requests; in a forked rank, run the rank's task."""
    descriptor, modules, *sys.path[:] = sys.argv[1:]
    # Imported here so that ranks inherit them.
    import torch

    import phalanx.backend.process_group
    import phalanx.launcher.rank_bootstrap
    import phalanx.system.pickling
    import phalanx.testing.faults

    del phalanx
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    # Spares the ranks a garbage collection of these modules' objects when they end.
    gc.freeze()
    # Ranks outnumber the cores in most runs with faults, and threads do not survive a fork.
    torch.set_num_threads(1)
    task = _serve(Connection(int(descriptor)))
    if task is not None:
        _run_task(task)


def _serve(connection: Connection) -> Task | None:
    """Answer requests until the client is gone; in a forked rank, return the rank's task."""
    while True:
        try:
            request, argument = connection.recv()
        except (EOFError, ConnectionError):
            return None
        if request == "start":
            task = _start(argument, connection)
            if task is not None:
                return task
        elif request == "reap":
            connection.send([_reap(pid) for pid in argument])
        else:
            connection.send(_import(argument))


def _start(tasks: Sequence[Task], connection: Connection) -> Task | None:
    """Fork a rank for each task and send the pids to the client; in a rank, return its task."""
    server, pids = os.getpid(), list[int]()
    for task in tasks:
        try:
            pid = os.fork()
        except OSError as error:  # no more processes
            for rank in pids:
                os.kill(rank, signal.SIGKILL)
                os.waitpid(rank, 0)
            connection.send(error)
            return None
        if pid == 0:
            _set_up_rank(task, server, connection)
            return task
        pids.append(pid)
    connection.send(pids)
    return None


def _import(module: str) -> Exception | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - the client raises it
        return error
    gc.freeze()
    return None


def _reap(pid: int) -> int:
    """Kill a rank's process group, wait until the rank has ended, and return its wait status."""
    signal_group(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _set_up_rank(task: Task, server: int, connection: Connection) -> None:
    from phalanx.launcher.rank_bootstrap import die_with_parent

    die_with_parent(server)
    os.setsid()
    connection.close()
    for number, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(task.file(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    faulthandler.enable()
    os.environ.update(task.environment)


def _run_task(task: Task) -> None:
    try:
        if task.faults is not None:
            from phalanx.testing.faults import enable_faults

            enable_faults(pickle.loads(task.faults), task.rank, record=str(task.file("record")))
        function, arguments, options = pickle.loads(task.call)
        outcome = Outcome(value=function(*arguments, **options), time=time.monotonic())
    except BaseException as error:
        now = time.monotonic()
        _deliver(task, Outcome(error=error, traceback=traceback.format_exc(), time=now))
        raise
    _deliver(task, outcome)
    if task.skips_finalization:
        sys.stdout.flush()
        os._exit(0)


def _deliver(task: Task, outcome: Outcome) -> None:
    from phalanx.system import pickling

    try:
        data = pickling.dumps(outcome)
        pickle.loads(data)  # an exception with its own __init__ may fail only here
    except Exception as error:  # noqa: BLE001 - the object's own code may raise anything
        data = pickling.dumps(_without_object(outcome, error))
    part = task.file("part")
    part.write_bytes(data)
    part.rename(task.file("outcome"))


def _without_object(outcome: Outcome, reason: Exception) -> Outcome:
    """Return a substitute for an outcome whose value or exception can't be pickled."""
    if outcome.error is None:
        kind = type(outcome.value).__qualname__
        return Outcome(
            error=TypeError(f"the result, of type {kind}, can't be pickled ({reason})"),
            time=outcome.time,
        )
    words = "".join(traceback.format_exception_only(type(outcome.error), outcome.error)).strip()
    return Outcome(error=RuntimeError(words), traceback=outcome.traceback, time=outcome.time)
