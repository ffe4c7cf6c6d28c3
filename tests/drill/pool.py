"""Rank processes that carry out one function after another; one that dies is replaced.

Groups are formed anew for each trial: who survives a hundred deaths has formed a hundred groups.
"""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import torch.distributed as dist

from phalanx.launcher.store import HOST, host_store
from phalanx.testing.fork_server import Task
from phalanx.testing.processes import Ended, ForkServer, Ranks

# Seconds that a process may take to come, or to end.
_PATIENCE = 60.0


@dataclass(frozen=True)
class Answer:
    """What a rank's function returned or raised; neither, if it died or hung."""

    value: Any = None
    error: BaseException | None = None
    hung: bool = False


@dataclass(frozen=True)
class Place:
    """A rank's place in a trial."""

    rank: int
    size: int
    trial: str
    port: int

    def form(self, backend: str, timeout: float) -> None:
        """Form the trial's group of all its ranks."""
        store = dist.TCPStore(HOST, self.port, wait_for_workers=False)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(self.trial, store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )


class _Worker:
    def __init__(self, ranks: Ranks, connection: Connection, folder: str) -> None:
        self.ranks = ranks
        self.pid = ranks.pids[0]
        self.connection = connection
        self.folder = folder


class Pool:
    """So many rank processes; a context manager.

    Args:
        size: The most ranks of a trial.
        modules: What they import before they are forked.
    """

    def __init__(self, size: int, modules: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-pool-")
        self._listener = Listener(str(Path(self._folder.name, "socket")))
        self._store = host_store()
        jobs = Path(self._folder.name, "jobs")
        jobs.mkdir(mode=0o700)
        environment = {"GLOO_SOCKET_IFNAME": "lo", "PHALANX_JOBS_DIR": str(jobs)}
        self._server = ForkServer(
            [__name__, "torch.distributed.nn.functional", *modules], environment
        )
        self._started = 0
        self._trials = 0
        self._workers = [self._start() for _ in range(size)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.send(None)
            worker.ranks.wait(_PATIENCE if error is None else 0)
            self._collect(worker)
        self._server.close()
        self._listener.close()
        self._folder.cleanup()

    def pid(self, rank: int) -> int:
        """Which process is this rank in the next trial."""
        return self._workers[rank].pid

    def begin(self, size: int, function: Callable[..., object], *arguments: object) -> None:
        """Have ranks 0 to `size` - 1 call `function(place, *arguments)`."""
        self._trials += 1
        for rank, worker in enumerate(self._workers[:size]):
            place = Place(rank, size, f"trial-{self._trials}", self._store.port)
            worker.connection.send_bytes(cloudpickle.dumps((function, (place, *arguments))))

    def finish(self, size: int, limit: float) -> list[Answer]:
        """What they answer; who hasn't within `limit` seconds hangs, and is killed."""
        deadline = time.monotonic() + limit
        waiting: dict[Any, int] = {w.connection: n for n, w in enumerate(self._workers[:size])}
        answers = [Answer(hung=True)] * size
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                answers[waiting.pop(connection)] = _received(connection)
        return answers

    def replace(self, rank: int, *, dead: bool = False) -> Ended:
        """Put a fresh process in a rank's place; how the old one ended.

        `dead`: it has died or is about to, else it hangs and is killed.
        """
        worker = self._workers[rank]
        if not dead or worker.ranks.wait(_PATIENCE):
            worker.ranks.end([0])
        ended = self._collect(worker)
        self._workers[rank] = self._start()
        return ended

    def _start(self) -> _Worker:
        self._started += 1
        folder = Path(self._folder.name, str(self._started))
        folder.mkdir()
        call = cloudpickle.dumps((serve, (str(self._listener.address),), {}))
        ranks = self._server.start([Task(call, str(folder), 0, {}, brief=True)])
        return _Worker(ranks, self._listener.accept(), str(folder))

    def _collect(self, worker: _Worker) -> Ended:
        worker.connection.close()
        (ended,) = worker.ranks.collect()
        for path in Path(worker.folder).iterdir():
            path.unlink()
        Path(worker.folder).rmdir()
        return ended


def _received(connection: Any) -> Answer:
    try:
        answer: Answer = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return Answer()
    return answer


class Fatal(Exception):
    """Carries an exception that is meant to end the process."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def serve(address: str) -> None:
    """What each process runs: one function after another."""
    connection = Client(address)
    while True:
        message = connection.recv_bytes()
        call = pickle.loads(message)
        if call is None:
            return
        function, arguments = call
        try:
            answer = Answer(value=function(*arguments))
        except Fatal as fatal:
            raise fatal.error from None
        except Exception as error:
            answer = Answer(error=error)
        connection.send_bytes(cloudpickle.dumps(answer))
