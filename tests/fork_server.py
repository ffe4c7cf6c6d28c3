"""The process from which `tests/ranks.py` forks ranks: torch is imported once, not once per rank.

A forked rank is a process like any other: it has its own pid, is killed like any other, and ends
like any other, by falling off the end of this script, with `atexit` and all (but see `work`). The
server has no threads and no groups that a child could inherit. It keeps the ranks that have ended
as zombies until it is told to reap them, so that their peers can see how they ended.
"""

import gc
import importlib
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """What one rank has to do."""

    call: bytes
    """Pickled `(function, arguments)`."""
    folder: str
    """Where the outcome, stdout and stderr go."""
    rank: int
    size: int
    timeout: float | None
    """The timeout of the group that `function` runs in, in seconds; None: no group."""


@dataclass(frozen=True)
class Outcome:
    """What a rank hands back: a value, or an error and when (monotonic seconds) it came up."""

    value: object = None
    error: BaseException | None = None
    traceback: str = ""
    time: float = 0.0


def serve(connection: Connection) -> Job:
    """Fork a child for every job that comes in; returns in the children only."""
    while True:
        try:
            request, argument = connection.recv()
        except EOFError:
            sys.exit(0)
        if request == "reap":
            connection.send([os.waitpid(pid, 0)[1] for pid in argument])
            continue
        if request == "import":
            importlib.import_module(argument)
            gc.freeze()
            connection.send(argument)
            continue
        server, pids = os.getpid(), []
        for job in argument:
            pid = os.fork()
            if pid == 0:
                become(job, server, connection)
                return job
            pids.append(pid)
        connection.send(pids)


def become(job: Job, server: int, connection: Connection) -> None:
    from phalanx.launch.child import die_with_parent

    die_with_parent(server)
    connection.close()
    for number, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(f"{job.folder}/{name}-{job.rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.size), FOLDER=job.folder)


def work(job: Job) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    function, arguments = pickle.loads(job.call)
    if job.timeout is not None:
        dist.init_process_group(
            "phalanx",
            init_method=f"file://{job.folder}/store",
            rank=job.rank,
            world_size=job.size,
            timeout=timedelta(seconds=job.timeout),
        )
    try:
        outcome = Outcome(value=function(*arguments))
        if job.timeout is not None and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        now = time.monotonic()
        deliver(job, Outcome(error=error, traceback=traceback.format_exc(), time=now))
        raise
    deliver(job, outcome)
    if job.timeout is not None:
        # The end of an interpreter costs more than most tests. It is the subject of those that form
        # their own group.
        sys.stdout.flush()
        os._exit(0)


def deliver(job: Job, outcome: Outcome) -> None:
    import cloudpickle

    path = Path(job.folder, f"outcome-{job.rank}")
    path.with_suffix(".part").write_bytes(cloudpickle.dumps(outcome))
    path.with_suffix(".part").rename(path)


def main() -> None:
    descriptor, *sys.path[:] = sys.argv[1:]
    # What ranks need, so that they find it imported.
    import cloudpickle
    import numpy
    import pytest
    import torch

    import phalanx.backend.process_group
    import phalanx.launch.child

    del cloudpickle, numpy, pytest, phalanx
    # Objects of these modules are never collected: the ends of the ranks needn't look at them.
    gc.freeze()
    # Ranks outnumber the cores as it is.
    torch.set_num_threads(1)
    # Outcomes are pickled under this name, not under __main__.
    from tests.fork_server import serve, work

    work(serve(Connection(int(descriptor))))


if __name__ == "__main__":
    main()
