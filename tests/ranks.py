"""The fixture `ranks`: real processes, each one rank, that run a function of the test's module.

They are forked from a server that has torch imported already (`tests/fork_server.py`), so a test
pays some hundredths of a second for each. A folder of tests takes it into its `conftest.py`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.fork_server import Job, Outcome

REPOSITORY = Path(__file__).parents[1]
# Seconds that the ranks of a test may take, unless it says otherwise: a hang is a failure.
LIMIT = 60.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    rank: int
    pid: int
    code: int
    """The exit code; negative: the signal that killed it."""
    outcome: Outcome | None
    stdout: str
    stderr: str

    @property
    def value(self) -> Any:
        """What the function returned; the test fails here if it didn't."""
        if self.outcome is None or self.outcome.error is not None or self.code != 0:
            pytest.fail(self.report())
        return self.outcome.value

    @property
    def error(self) -> BaseException:
        """What the function raised; the test fails here if it didn't."""
        if self.outcome is None or self.outcome.error is None:
            pytest.fail(f"no exception on this rank:\n{self.report()}")
        return self.outcome.error

    @property
    def error_time(self) -> float:
        """When the function raised, in monotonic seconds."""
        assert self.outcome is not None
        return self.outcome.time

    def report(self) -> str:
        parts = [f"rank {self.rank} (pid {self.pid}) ended with code {self.code}"]
        if self.outcome is not None and self.outcome.error is not None:
            parts.append(self.outcome.traceback)
        else:
            parts += [self.stdout, self.stderr]
        return "\n".join(part for part in parts if part)


class Run:
    """Ranks that have been started and not yet collected."""

    def __init__(self, server: RankServer, folder: Path, pids: list[int]) -> None:
        self.folder = folder
        self.pids = pids
        self._server = server
        self._handles = [os.pidfd_open(pid) for pid in pids]

    def signal(self, rank: int, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._handles[rank], number)

    def wait(self, limit: float, ranks: list[int] | None = None) -> list[int]:
        """Wait until the ranks have ended; returns those that haven't within `limit` seconds."""
        deadline = time.monotonic() + limit
        waiting = dict(enumerate(self._handles))
        if ranks is not None:
            waiting = {rank: waiting[rank] for rank in ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            ended, _, _ = select.select(list(waiting.values()), [], [], left)
            waiting = {rank: handle for rank, handle in waiting.items() if handle not in ended}
        return list(waiting)

    def join(self, limit: float = LIMIT) -> list[Ended]:
        """Wait until all ranks have ended; a rank that hasn't within `limit` fails the test."""
        hung = self.wait(limit)
        ended = self.collect()
        if hung:
            reports = "\n".join(rank.report() for rank in ended)
            pytest.fail(f"ranks {hung} still ran after {limit:g} s:\n{reports}")
        return ended

    def collect(self) -> list[Ended]:
        """Kill the ranks that still run, and tell how all of them ended."""
        for rank in range(len(self.pids)):
            with contextlib.suppress(ProcessLookupError):
                self.signal(rank, signal.SIGKILL)
        statuses = self._server.reap(self.pids)
        for handle in self._handles:
            os.close(handle)
        return [self._ended(rank, status) for rank, status in enumerate(statuses)]

    def _ended(self, rank: int, status: int) -> Ended:
        path = self.folder / f"outcome-{rank}"
        outcome = pickle.loads(path.read_bytes()) if path.exists() else None
        texts = [(self.folder / f"{name}-{rank}").read_text() for name in ("stdout", "stderr")]
        return Ended(rank, self.pids[rank], os.waitstatus_to_exitcode(status), outcome, *texts)


class RankServer:
    """Starts ranks; made by the fixture `ranks`."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._connection, theirs = Pipe()
        path = [str(REPOSITORY), *(entry or os.getcwd() for entry in sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "tests/fork_server.py"), str(theirs.fileno()), *path],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        theirs.close()

    def close(self) -> None:
        self._connection.close()
        self._process.wait(10)

    def start(
        self,
        size: int,
        function: Callable[..., object],
        *arguments: object,
        timeout: float | None = 20.0,
    ) -> Run:
        """Start `size` ranks that run `function(*arguments)`.

        Each is in a group of all of them, of the backend "phalanx" with this `timeout`; with None
        for a timeout there is no group. `RANK`, `WORLD_SIZE` and `FOLDER`, a fresh folder that they
        share, are in their environment.
        """
        folder = self._folders.mktemp("ranks")
        call = cloudpickle.dumps((function, arguments))
        jobs = [Job(call, str(folder), rank, size, timeout) for rank in range(size)]
        return Run(self, folder, self._ask("start", jobs))

    def run(
        self,
        size: int,
        function: Callable[..., object],
        *arguments: object,
        timeout: float | None = 20.0,
        limit: float = LIMIT,
    ) -> list[Any]:
        """Start ranks as `start` does, and return what `function` returned, by rank.

        A rank that raises, dies or hangs fails the test.
        """
        ended = self.start(size, function, *arguments, timeout=timeout).join(limit)
        if failed := [rank for rank in ended if rank.code != 0]:
            pytest.fail("\n".join(rank.report() for rank in failed))
        return [rank.value for rank in ended]

    def preload(self, module: str) -> None:
        """Import a heavy module once, so that not every rank has to."""
        self._ask("import", module)

    def reap(self, pids: list[int]) -> list[int]:
        statuses: list[int] = self._ask("reap", pids)
        return statuses

    def _ask(self, request: str, argument: object) -> Any:
        self._connection.send((request, argument))
        if not self._connection.poll(LIMIT):
            raise TimeoutError(f"the fork server doesn't answer to {request!r}")
        return self._connection.recv()


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Start functions on real processes: `ranks.run(2, function, argument)`."""
    server = RankServer(tmp_path_factory)
    try:
        yield server
    finally:
        server.close()
