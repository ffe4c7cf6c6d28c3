"""The fixture `ranks`: real processes, each one rank, that run a function of the test's module.

They are forked by the fork server of `phalanx.testing`, so a test pays some hundredths of a second
for each. A folder of tests takes it into its `conftest.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import pytest
import torch.distributed as dist

from phalanx.testing import processes
from phalanx.testing.fork_server import Outcome, Task

# Which host each rank is on, a letter for each, over and over: to run tests of one host on many.
HOSTS = os.environ.get("PHALANX_TEST_HOSTS", "")
# Seconds that the ranks of a test may take, unless it says otherwise: a hang is a failure.
LIMIT = 60.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended; the test fails where it asks for what isn't there."""

    rank: int
    pid: int
    code: int
    """The exit code; negative: the signal that killed it."""
    outcome: Outcome | None
    stdout: str
    stderr: str
    words: str

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
        return self.words


class Run:
    """Ranks that have been started and not yet collected."""

    def __init__(self, ranks: processes.RankProcesses) -> None:
        self._ranks = ranks
        self.folder = ranks.folder
        self.pids = ranks.pids
        self.signal = ranks.signal
        self.wait = ranks.wait

    def join(self, limit: float = LIMIT) -> list[Ended]:
        """Wait until all ranks have ended; a rank that hasn't within `limit` fails the test."""
        hung = self.wait(limit)
        self._ranks.kill(hung)
        ended = self.collect(hung)
        if hung:
            reports = "\n".join(rank.report() for rank in ended)
            pytest.fail(f"ranks {hung} still ran after {limit:g} s:\n{reports}")
        return ended

    def collect(self, hung: list[int] | None = None) -> list[Ended]:
        """Kill the ranks that still run, and tell how all of them ended."""
        return [
            Ended(end.rank, end.pid, end.code, end.outcome, end.stdout, end.stderr, str(end))
            for end in self._ranks.collect(hung or [])
        ]


class RankServer:
    """Starts ranks; made by the fixture `ranks`."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        # Ranks outnumber the cores as it is.
        alone = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._server = processes.ForkServer(["numpy", "pytest"], alone)
        self.close = self._server.close
        self.preload = self._server.preload

    def start(
        self,
        size: int,
        function: Callable[..., object],
        *arguments: object,
        timeout: float | None = 20.0,
        hosts: str = "",
    ) -> Run:
        """Start `size` ranks that run `function(*arguments)`.

        Each is in a group of all of them, of the backend "phalanx" with this `timeout`; with None
        for a timeout there is no group. `RANK`, `WORLD_SIZE` and `FOLDER`, a fresh folder that they
        share, are in their environment.

        `hosts` has a letter for the host of each rank: they take themselves for different ones.
        """
        folder = str(self._folders.mktemp("ranks"))
        if timeout is not None:
            function, arguments = in_a_group, (timeout, function, *arguments)
        call = cloudpickle.dumps((function, arguments, {}))
        tasks = []
        for rank in range(size):
            place = {"RANK": str(rank), "WORLD_SIZE": str(size), "FOLDER": folder}
            if hosts := hosts or HOSTS:
                place["PHALANX_HOST_ID"] = hosts[rank % len(hosts)]
            # The end of an interpreter costs more than most tests. It is the subject of those that
            # form their own group.
            tasks.append(Task(call, folder, rank, place, skips_finalization=timeout is not None))
        return Run(self._server.start(tasks))

    def run(
        self,
        size: int,
        function: Callable[..., object],
        *arguments: object,
        timeout: float | None = 20.0,
        limit: float = LIMIT,
        hosts: str = "",
    ) -> list[Any]:
        """Start ranks as `start` does, and return what `function` returned, by rank.

        A rank that raises, dies or hangs fails the test.
        """
        run = self.start(size, function, *arguments, timeout=timeout, hosts=hosts)
        ended = run.join(limit)
        if failed := [rank for rank in ended if rank.code != 0]:
            pytest.fail("\n".join(rank.report() for rank in failed))
        return [rank.value for rank in ended]


def in_a_group(timeout: float, function: Callable[..., object], *arguments: object) -> object:
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )
    value = function(*arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


@contextmanager
def all_raise(kind: type[Exception], words: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The error that all ranks get, the very same."""
    with pytest.raises(kind, match=words) as raised:
        yield raised
    said = [""] * dist.get_world_size()
    dist.all_gather_object(said, str(raised.value))
    assert len(set(said)) == 1


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Start functions on real processes: `ranks.run(2, function, argument)`."""
    server = RankServer(tmp_path_factory)
    try:
        yield server
    finally:
        server.close()
