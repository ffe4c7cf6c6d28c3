"""Servers of replicated embedding tables that are killed one after another, under load.

Trainers update the rows all the time. After each death, the parts of the dead server get copies on
a spare worker, and another process joins as a spare; some spares die while they get a copy. Each
update adds known values to known rows, so that in the end every row shows how many updates were
made: those that were acknowledged to trainers, no more and no fewer.
"""

from __future__ import annotations

import itertools
import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from phalanx import embedding, rpc
from phalanx.embedding import SGD, ShardedEmbeddingBag
from phalanx.embedding.replicated_server import ReplicatedServer
from phalanx.errors import PhalanxError
from phalanx.testing.fork_server import Task
from phalanx.testing.processes import ForkServer, RankProcesses

ROWS, WIDTH, BATCH = 6_000, 16, 64
SERVERS, TRAINERS, SPARES = 3, 2, 2
# Seconds that an update may take, whatever dies, and a process to join or to end.
LIMIT = 30.0
STALENESS = 4
# Updates that trainers make after they were told to end, so that they all end after the same one.
MORE_UPDATES = 300


@dataclass
class Trial:
    """A table whose servers are killed, and its results."""

    staleness: int | None
    kills: int = 0
    deaths_in_copies: int = 0
    updates: int = 0
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    """For each kill and trainer: seconds from the kill to the end of the first update after it."""
    wrong: list[str] = field(default_factory=list)


def join(name: str, number: int, store: str) -> None:
    """Join as a worker with that name; a rank that was used before only gives a new id."""
    options = rpc.RpcBackendOptions(rpc_timeout=LIMIT, init_method=store)
    rpc.init_rpc(name, rank=number, world_size=0, rpc_backend_options=options)


def serve(name: str, number: int, store: str) -> None:
    """Be a worker until the driver has gone."""
    torch.set_num_threads(1)
    join(name, number, store)
    end = threading.Event()
    from phalanx.rpc.agent import agent

    driver = rpc.get_worker_info("driver").id
    agent().loss_listeners.append(lambda worker, _: worker == driver and end.set())
    end.wait()
    rpc.shutdown(graceful=False)


@dataclass
class _Training:
    """The training of this process."""

    updates: int = 0
    end: int | None = None
    """The number of updates after which it ends."""


_training = _Training()


def count_updates() -> int:
    """Return how many updates the trainer of this process has made."""
    return _training.updates


def stop_after(updates: int) -> None:
    """Have the trainer of this process end after so many updates."""
    _training.end = updates


def make_zeros(rows: torch.Tensor) -> torch.Tensor:
    """Return the initial rows."""
    return torch.zeros(len(rows), WIDTH, dtype=torch.float64)


def train(
    servers: list[ReplicatedServer], trainer: int, seed: int
) -> tuple[np.ndarray[Any, Any], list[tuple[float, float]]]:
    """Update random rows until `stop_after`.

    Returns:
        For each row, how often it was in an acknowledged update; begin and end of each update.
    """
    generator = torch.Generator().manual_seed(seed)
    bag = ShardedEmbeddingBag(ROWS, WIDTH, servers, mode="sum", trainer=trainer)
    counts, times = torch.zeros(ROWS, dtype=torch.int64), []
    while True:
        rows = torch.randint(ROWS, (BATCH,), generator=generator)
        begin = time.monotonic()
        bag(rows[:, None]).sum().neg().backward()
        bag.step()
        bag.wait()
        times.append((begin, time.monotonic()))
        counts += torch.bincount(rows, minlength=ROWS)
        _training.updates += 1
        if _training.updates == _training.end:
            if bag.staleness is not None:
                bag.leave()
            return counts.numpy(), times


class _Workers:
    """The processes, and the driver's side of RPC."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count(1)
        self._server = ForkServer([__name__])
        self._processes: dict[str, RankProcesses] = {}
        self.store = f"file://{folder}/store"
        join("driver", 0, self.store)

    def start(self, kind: str) -> str:
        """Start a worker; return its name."""
        number = next(self._numbers)
        name = f"{kind}{number}"
        call = pickle.dumps((serve, (name, number, self.store), {}))
        task = Task(call, str(self._folder), number, {"OMP_NUM_THREADS": "1"})
        self._processes[name] = self._server.start([task])
        return name

    def wait_for(self, name: str) -> None:
        """Wait until a worker has joined."""
        end = time.monotonic() + LIMIT
        while name not in {each.name for each in rpc.get_worker_infos()}:
            if time.monotonic() > end:
                raise TimeoutError(f"{name} did not join:\n{self._end(name)}")
            time.sleep(0.002)

    def kill(self, name: str) -> float:
        """Kill a worker; return when."""
        moment = time.monotonic()
        processes = self._processes.pop(name)
        processes.signal(0, signal.SIGKILL)
        processes.collect()
        return moment

    def _end(self, name: str) -> str:
        return str(self._processes[name].collect()[0])

    def close(self) -> list[str]:
        """End all; return what the workers that were not killed have to say."""
        rpc.shutdown(graceful=False)
        left = []
        for processes in self._processes.values():
            hung = processes.wait(LIMIT)
            processes.kill(hung)
            left += [str(each) for each in processes.collect(hung) if not each.returned]
        self._server.close()
        return left


def run(
    folder: Path,
    seed: int,
    kills: int,
    staleness: int | None,
    report: Callable[[], None] = lambda: None,
) -> Trial:
    """Kill servers of a table under load.

    Args:
        folder: A folder that this trial fills.
        seed: Seed of the victims, the moments and the batches.
        kills: Number of kills.
        staleness: The bound of the trainers; None for steps.
        report: Called after each kill.
    """
    trial, random = Trial(staleness), Random(f"{seed} {staleness} servers")
    workers = _Workers(folder)
    try:
        names = [workers.start("server") for _ in range(SERVERS)]
        spares = [workers.start("server") for _ in range(SPARES)]
        trainers = [workers.start("trainer") for _ in range(TRAINERS)]
        for name in [*names, *spares, *trainers]:
            workers.wait_for(name)
        servers: Any = embedding.deploy(
            names,
            ROWS,
            WIDTH,
            SGD(1.0),
            trainers=TRAINERS if staleness is None else None,
            staleness=staleness,
            timeout=LIMIT,
            dtype=torch.float64,
            weight=make_zeros,
            replicated=True,
        )
        futures = [
            rpc.rpc_async(name, train, (servers, number, random.randrange(2**31)), timeout=0)
            for number, name in enumerate(trainers)
        ]
        begin, moments = time.monotonic(), list[float]()
        while len(moments) < kills and not any(future.done() for future in futures):
            time.sleep(random.expovariate(1 / 0.1))
            moments += _kill_one(trial, random, workers, servers, names, spares)
            report()
        trial.seconds, trial.kills = time.monotonic() - begin, len(moments)
        end = max(rpc.rpc_sync(name, count_updates) for name in trainers) + MORE_UPDATES
        for name in trainers:
            rpc.rpc_sync(name, stop_after, (end,))
        results = [future.wait() for future in futures]
        _check(trial, servers, results, moments)
    except (PhalanxError, TimeoutError) as error:
        trial.wrong.append(f"{type(error).__name__}: {error}")
    trial.wrong += workers.close()
    return trial


def _kill_one(
    trial: Trial,
    random: Random,
    workers: _Workers,
    servers: list[ReplicatedServer],
    names: list[str],
    spares: list[str],
) -> list[float]:
    """Kill a server, and give its parts copies elsewhere; return the moments of all deaths."""
    victim = names.pop(random.randrange(len(names)))
    moments = [workers.kill(victim)]
    while len(names) < SERVERS:
        target = spares.pop(0)
        workers.wait_for(target)
        spares.append(workers.start("server"))
        if random.random() < 0.1:  # the target dies, in the copy or just before or after it
            timer = threading.Timer(random.uniform(0, 0.02), workers.kill, (target,))
            timer.start()
            try:
                embedding.replicate(servers, [target])
            except PhalanxError:
                trial.deaths_in_copies += 1
            timer.join()
            moments.append(time.monotonic())
            continue
        embedding.replicate(servers, [target, *names])
        names.append(target)
    return moments


def _check(
    trial: Trial,
    servers: list[ReplicatedServer],
    results: list[tuple[np.ndarray[Any, Any], list[tuple[float, float]]]],
    moments: list[float],
) -> None:
    """Compare the rows with the acknowledged updates, and take the times."""
    # A step makes the mean of the updates of the trainers.
    expected = sum(counts for counts, _ in results) / (TRAINERS if trial.staleness is None else 1)
    bag = ShardedEmbeddingBag(ROWS, WIDTH, servers, mode="sum")
    with torch.no_grad():
        found = bag(torch.arange(ROWS)[:, None]).numpy()
    wrong = np.flatnonzero((found != expected[:, None]).any(1))
    if len(wrong):
        trial.wrong.append(
            f"{len(wrong)} rows are wrong, first row {wrong[0]}: {found[wrong[0]]}, expected "
            f"{expected[wrong[0]]}"
        )
    trial.updates = sum(len(times) for _, times in results)
    for _, times in results:
        begins = np.array([begin for begin, _ in times])
        for moment in moments:
            first = int(np.searchsorted(begins, moment))
            if first < len(times):
                trial.times.append(times[first][1] - moment)
