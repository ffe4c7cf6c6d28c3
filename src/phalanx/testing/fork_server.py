"""The process that ranks are forked from: torch is imported once, and not once for each rank.

A forked rank is a process like any other: it has a pid and a session of its own, is killed like
any other, and ends like any other, by falling off the end of this script, with `atexit` and all
(unless it is a `brief` one). The server has no threads and no groups that a rank could inherit. It
keeps the ranks that have ended as zombies until it is told to reap them, so that their peers can
see how they ended. When its client is gone it ends, and the kernel kills the ranks that are left.
"""

from __future__ import annotations

import contextlib
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

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Outcome", "Task", "main"]


@dataclass(frozen=True)
class Task:
    """What one rank has to do.

    Attributes:
        call: Pickled `(function, arguments, keyword arguments)`.
        folder: Where outcome, stdout and stderr go.
        rank: Its number, part of the names of these files.
        environment: Variables to set.
        faults: Those of all ranks, pickled by cloudpickle, to be armed; None: nothing is counted.
        brief: After the function has returned, end without Python's own end, which costs more than
            most functions of tests.
    """

    call: bytes
    folder: str
    rank: int
    environment: Mapping[str, str]
    faults: bytes | None = None
    brief: bool = False

    def file(self, name: str) -> Path:
        """A file of this rank."""
        return Path(self.folder, f"{name}-{self.rank}")


@dataclass(frozen=True)
class Outcome:
    """What a rank hands back: a value, or an exception; and when (monotonic seconds) that was."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    time: float = 0.0


def main() -> None:
    """Serve; in a forked rank, run its task."""
    descriptor, modules, *sys.path[:] = sys.argv[1:]
    # What ranks need, so that they find it imported.
    import cloudpickle
    import torch

    import phalanx.backend.process_group
    import phalanx.launch.child
    import phalanx.testing.striking

    del cloudpickle, phalanx
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    # Objects of these modules are never collected: the ends of the ranks needn't look at them.
    gc.freeze()
    # Ranks outnumber the cores in most drills, and threads would be lost in the fork.
    torch.set_num_threads(1)
    task = _serve(Connection(int(descriptor)))
    if task is not None:
        _work(task)


def _serve(connection: Connection) -> Task | None:
    """Answer requests until the client is gone; in a forked rank, returns its task."""
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
    """Fork a rank for each task, and tell their pids; returns the task in the rank."""
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
            _become(task, server, connection)
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
    """The wait status of a rank that has ended; what it started and left behind is killed."""
    # Until it is reaped nobody else can have its number.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _become(task: Task, server: int, connection: Connection) -> None:
    from phalanx.launch.child import die_with_parent

    die_with_parent(server)
    os.setsid()
    connection.close()
    for number, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(task.file(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    faulthandler.enable()
    os.environ.update(task.environment)


def _work(task: Task) -> None:
    try:
        if task.faults is not None:
            from phalanx.testing.striking import arm

            arm(pickle.loads(task.faults), task.rank, record=str(task.file("record")))
        function, arguments, options = pickle.loads(task.call)
        outcome = Outcome(value=function(*arguments, **options), time=time.monotonic())
    except BaseException as error:
        now = time.monotonic()
        _deliver(task, Outcome(error=error, traceback=traceback.format_exc(), time=now))
        raise
    _deliver(task, outcome)
    if task.brief:
        sys.stdout.flush()
        os._exit(0)


def _deliver(task: Task, outcome: Outcome) -> None:
    import cloudpickle

    try:
        data = cloudpickle.dumps(outcome)
        pickle.loads(data)  # an exception with its own __init__ may only fail here
    except Exception as error:  # noqa: BLE001 - whatever the object's own code raises
        data = cloudpickle.dumps(_without_object(outcome, error))
    part = task.file("part")
    part.write_bytes(data)
    part.rename(task.file("outcome"))


def _without_object(outcome: Outcome, reason: Exception) -> Outcome:
    """The same outcome, of which the value or the exception can't travel."""
    if outcome.error is None:
        kind = type(outcome.value).__qualname__
        return Outcome(
            error=TypeError(f"the result, of type {kind}, can't be pickled ({reason})"),
            time=outcome.time,
        )
    words = "".join(traceback.format_exception_only(type(outcome.error), outcome.error)).strip()
    return Outcome(error=RuntimeError(words), traceback=outcome.traceback, time=outcome.time)
