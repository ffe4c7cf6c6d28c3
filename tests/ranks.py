"""The fixture `ranks`: real processes, each one rank, that run a function of the test's module.

They are forked by the fork server of `phalanx.testing`, so each costs a test some hundredths of a
second. A folder of tests imports the fixture in its `conftest.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from phalanx.testing import processes
from phalanx.testing.fork_server import Outcome, Task
from phalanx.topology import layout, places
from tests.waiting import once_blocked

# The host of each rank, one letter per rank, repeated: runs tests of one host on several hosts.
HOSTS = os.environ.get("PHALANX_TEST_HOSTS", "")
# Runs them with groups that meet over trees, if it is set.
TREES = bool(os.environ.get("PHALANX_TEST_TREES"))
# The default time limit of the ranks of a test, in seconds: a hang is a failure.
LIMIT = 90.0
# The default timeout of the operations of a group: an error that comes by itself comes before.
TIMEOUT = 60.0
# The timeout of the group's formation. A slow start of a rank is no subject of a test.
FORMATION = 60.0


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of a rank; an attribute that it lacks fails the test."""

    rank: int
    pid: int
    code: int
    """The exit code; the negated number of the signal that killed the rank, if one did."""
    outcome: Outcome | None
    stdout: str
    stderr: str
    words: str

    @property
    def value(self) -> Any:
        """The return value of the function; the test fails here if there is none."""
        if self.outcome is None or self.outcome.error is not None or self.code != 0:
            pytest.fail(self.report())
        return self.outcome.value

    @property
    def error(self) -> BaseException:
        """The exception of the function; the test fails here if there is none."""
        if self.outcome is None or self.outcome.error is None:
            pytest.fail(f"no exception on this rank:\n{self.report()}")
        return self.outcome.error

    @property
    def error_time(self) -> float:
        """The time of the exception, in monotonic seconds."""
        assert self.outcome is not None
        return self.outcome.time

    def report(self) -> str:
        return self.words


class RunningRanks:
    """Ranks that were started and have not been collected yet."""

    def __init__(self, ranks: processes.RankProcesses) -> None:
        self._ranks = ranks
        self.folder = ranks.folder
        self.pids = ranks.pids
        self.signal = ranks.signal
        self.wait = ranks.wait

    def join(self, limit: float = LIMIT) -> list[RankOutcome]:
        """Wait until all ranks have ended; one that exceeds `limit` fails the test."""
        hung = self.wait(limit)
        self._ranks.kill(hung)
        ended = self.collect(hung)
        if hung:
            reports = "\n".join(rank.report() for rank in ended)
            pytest.fail(f"ranks {hung} still ran after {limit:g} s:\n{reports}")
        return ended

    def collect(self, hung: list[int] | None = None) -> list[RankOutcome]:
        """Kill the ranks that still run, and return the outcomes of all."""
        return [
            RankOutcome(end.rank, end.pid, end.code, end.outcome, end.stdout, end.stderr, str(end))
            for end in self._ranks.collect(hung or [])
        ]


class RankServer:
    """A server that starts ranks; the fixture `ranks` creates it."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        # Ranks already outnumber the cores.
        alone = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._server = processes.ForkServer(["numpy", "pytest"], alone)
        self.close = self._server.close
        self.preload = self._server.preload

    def start(
        self,
        size: int,
        function: Callable[..., object],
        *arguments: object,
        timeout: float | None = TIMEOUT,
        hosts: str = "",
    ) -> RunningRanks:
        """Start `size` ranks that run `function(*arguments)`.

        They form a group of the backend "phalanx", or no group if `timeout` is None. Once all have
        formed it, `timeout` is that of its operations.
        Their environment has `RANK`, `WORLD_SIZE`, and `FOLDER`, a new folder that they share.

        `hosts` has one letter per rank: ranks with different letters simulate different hosts.
        """
        folder = str(self._folders.mktemp("ranks"))
        if timeout is not None:
            function, arguments = run_in_group, (timeout, function, *arguments)
        call = cloudpickle.dumps((function, arguments, {}))
        tasks = []
        for rank in range(size):
            place = {"RANK": str(rank), "WORLD_SIZE": str(size), "FOLDER": folder}
            if hosts := hosts or HOSTS:
                place["PHALANX_HOST_ID"] = hosts[rank % len(hosts)]
            # The finalization of an interpreter takes longer than most tests. Only tests that form
            # their own group examine it.
            tasks.append(Task(call, folder, rank, place, skips_finalization=timeout is not None))
        return RunningRanks(self._server.start(tasks))

    def run(
        self,
        size: int,
        function: Callable[..., object],
        *arguments: object,
        timeout: float | None = TIMEOUT,
        limit: float = LIMIT,
        hosts: str = "",
    ) -> list[Any]:
        """Start ranks as `start` does, and return the results of `function`, by rank.

        A rank that raises, dies or hangs fails the test.
        """
        run = self.start(size, function, *arguments, timeout=timeout, hosts=hosts)
        ended = run.join(limit)
        if failed := [rank for rank in ended if rank.code != 0]:
            pytest.fail("\n".join(rank.report() for rank in failed))
        return [rank.value for rank in ended]


def place_ranks_apart() -> None:
    """Have this rank take part in trees, as if every two ranks had a cache, every four a socket."""
    rank = int(os.environ["RANK"])
    places.MIN_RANKS = 3
    layout.own_place = lambda: (rank // 4 * 4, rank // 4 * 4, rank // 2 * 2)


def run_in_group(timeout: float, function: Callable[..., object], *arguments: object) -> object:
    if TREES:
        place_ranks_apart()
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=FORMATION),
    )
    meet("formed")
    _set_timeout(dist.group.WORLD, timeout)
    value = function(*arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _set_timeout(group: Any, seconds: float) -> None:
    # In a frame of its own: a variable of `run_in_group` would keep the group alive.
    group.set_timeout(timedelta(seconds=seconds))


def marker_file(name: str) -> Path:
    """A file in the folder that the ranks of a test share; its existence tells them something."""
    return Path(os.environ["FOLDER"], name)


def wait_for_file(name: str, seconds: float = LIMIT) -> None:
    end = time.monotonic() + seconds
    while not marker_file(name).exists():
        assert time.monotonic() < end, f"{name} was not created"
        time.sleep(0.002)


def meet(name: str) -> None:
    """Return once every rank has called this with the same name, without an operation."""
    size = dist.get_world_size()
    marker_file(f"{name}{dist.get_rank()}of{size}").touch()
    for rank in range(size):
        wait_for_file(f"{name}{rank}of{size}")


def announce_wait() -> None:
    """Tell the other ranks when this thread is blocked in the call that follows."""
    file = marker_file(f"waiting{dist.get_rank()}")
    once_blocked(file.touch)


def wait_until_others_wait() -> None:
    """Return once all other ranks are blocked in the call before which they announced it."""
    for rank in range(dist.get_world_size()):
        if rank != dist.get_rank():
            wait_for_file(f"waiting{rank}")


def connect_ranks() -> None:
    """Return once every rank has completed an all-reduce, so that none can still fail in it.

    A test can call it once for each world size.
    """
    dist.all_reduce(torch.ones(3))
    meet("connected")


@contextmanager
def all_raise(kind: type[Exception], words: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this kind that is identical on all ranks."""
    with pytest.raises(kind, match=words) as raised:
        yield raised
    messages = [""] * dist.get_world_size()
    dist.all_gather_object(messages, str(raised.value))
    assert len(set(messages)) == 1


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Start functions on real processes: `ranks.run(2, function, argument)`."""
    server = RankServer(tmp_path_factory)
    try:
        yield server
    finally:
        server.close()
