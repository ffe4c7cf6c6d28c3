"""A pool of rank processes that run one function after another; dead ranks are replaced.

Each trial forms new groups, so a rank that survives a hundred trials has formed a hundred groups.
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
from phalanx.testing.processes import ForkServer, RankProcesses, RankResult

# Seconds that a process may take to start or to end.
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Answer:
    """The value or exception of a rank's function; neither if the rank died or hung."""

    value: Any = None
    error: BaseException | None = None
    hung: bool = False


@dataclass(frozen=True)
class TrialRank:
    """A rank of a trial, and how to form its group."""

    rank: int
    size: int
    trial: str
    port: int

    def form(self, backend: str, timeout: float) -> None:
        """Form the group of all ranks of the trial."""
        store = dist.TCPStore(HOST, self.port, wait_for_workers=False)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(self.trial, store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )


class _Worker:
    def __init__(self, ranks: RankProcesses, connection: Connection, folder: str) -> None:
        self.ranks = ranks
        self.pid = ranks.pids[0]
        self.connection = connection
        self.folder = folder


class Pool:
    """A pool of rank processes; a context manager.

    Args:
        size: Maximum number of ranks of a trial.
        modules: Modules that the fork server imports before it forks ranks.
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
            worker.ranks.wait(_TIMEOUT if error is None else 0)
            self._collect(worker)
        self._server.close()
        self._listener.close()
        self._folder.cleanup()

    def pid(self, rank: int) -> int:
        """Return the pid of a rank in the next trial."""
        return self._workers[rank].pid

    def begin(self, size: int, function: Callable[..., object], *arguments: object) -> None:
        """Call `function(trial_rank, *arguments)` on ranks 0 to `size` - 1."""
        self._trials += 1
        for rank, worker in enumerate(self._workers[:size]):
            trial_rank = TrialRank(rank, size, f"trial-{self._trials}", self._store.port)
            worker.connection.send_bytes(cloudpickle.dumps((function, (trial_rank, *arguments))))

    def finish(self, size: int, limit: float) -> list[Answer]:
        """Return the answers; a rank without an answer after `limit` seconds counts as hung."""
        deadline = time.monotonic() + limit
        waiting: dict[Any, int] = {w.connection: n for n, w in enumerate(self._workers[:size])}
        answers = [Answer(hung=True)] * size
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), remaining):
                answers[waiting.pop(connection)] = _receive_answer(connection)
        return answers

    def replace(self, rank: int, *, has_died: bool = False) -> RankResult:
        """Replace a rank by a new process and return how the old one ended.

        Args:
            rank: The rank.
            has_died: Whether the process has died or is about to; otherwise it is killed.
        """
        worker = self._workers[rank]
        if not has_died or worker.ranks.wait(_TIMEOUT):
            worker.ranks.kill([0])
        ended = self._collect(worker)
        self._workers[rank] = self._start()
        return ended

    def _start(self) -> _Worker:
        self._started += 1
        folder = Path(self._folder.name, str(self._started))
        folder.mkdir()
        call = cloudpickle.dumps((serve, (str(self._listener.address),), {}))
        ranks = self._server.start([Task(call, str(folder), 0, {}, skips_finalization=True)])
        return _Worker(ranks, self._listener.accept(), str(folder))

    def _collect(self, worker: _Worker) -> RankResult:
        worker.connection.close()
        (ended,) = worker.ranks.collect()
        for path in Path(worker.folder).iterdir():
            path.unlink()
        Path(worker.folder).rmdir()
        return ended


def _receive_answer(connection: Any) -> Answer:
    try:
        answer: Answer = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return Answer()
    return answer


class Fatal(Exception):
    """A wrapper of an exception that is meant to end the process."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def serve(address: str) -> None:
    """Run functions one after another until the connection sends None."""
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
