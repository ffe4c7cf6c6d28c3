"""Schedules: random programs of remote references, with pauses where threads hand over.

Whatever the order in which threads come to their turn, no value may be lost, no call may hang, and
in the end no value is left. The pauses are drawn from a seed. They do not decide the schedule, but
a failure comes again with its seed in most runs.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from phalanx import rpc
from phalanx.rpc.agent import Agent, agent
from phalanx.rpc.event_loop import Reactor
from phalanx.rpc.reference_counting import OwnedValues
from phalanx.rpc.server import RpcServer
from phalanx.system.polling import wait_until
from tests.fault_injection.pool import Pool, TrialRank

WORKERS = 3
# Seconds that a call may take, and what is left at the end of a program to be freed.
LIMIT = 30.0
_PAUSES = (0, 0, 0, 0, 0.0002, 0.001, 0.005)
BATCH = 100
"""The number of programs of one group of workers."""
# Where a thread goes on with what another one has begun.
_HAND_OVERS: tuple[tuple[type, str], ...] = (
    (Agent, "_on_answer"),
    (Agent, "_send"),
    (Reactor, "submit"),
    (OwnedValues, "apply"),
    (OwnedValues, "begin"),
    (RpcServer, "_begin"),
    (RpcServer, "_handle"),
    (RpcServer, "_read"),
    (RpcServer, "_receive"),
)


class Pauses:
    """The pauses of a process, drawn anew for each program."""

    def __init__(self) -> None:
        self._chosen = Random(0)
        for owner, name in _HAND_OVERS:
            setattr(owner, name, self._pausing(getattr(owner, name)))

    def draw(self, seed: str) -> None:
        """Draw other pauses from now on."""
        self._chosen = Random(seed)

    def _pausing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def pause_first(*arguments: Any, **options: Any) -> Any:
            if pause := self._chosen.choice(_PAUSES):
                time.sleep(pause)
            return function(*arguments, **options)

        return pause_first


@functools.cache
def pauses() -> Pauses:
    """Return the pauses of this process, which begin with the first call."""
    return Pauses()


def draw_pauses(seed: str) -> None:
    """Draw the pauses of this worker."""
    pauses().draw(f"{seed} {rpc.get_worker_info().id}")


def create(owner: int, number: int, size: int) -> rpc.RRef[torch.Tensor]:
    """Return a reference to a value on a worker."""
    return rpc.remote(owner, torch.full, args=((size,), float(number)))


def pass_on(rref: rpc.RRef[torch.Tensor]) -> rpc.RRef[torch.Tensor]:
    """Return the reference."""
    return rref


def fetch(rref: rpc.RRef[torch.Tensor]) -> float:
    """Return the number in a value, or NaN if it has several."""
    value = rref.to_here(timeout=LIMIT)
    return float(value[0]) if (value == value[0]).all() else float("nan")


def count_owned() -> int:
    """Return how many values this worker owns."""
    return len(agent().owned_values)


def run_program(seed: str) -> str:
    """Run a program; return what went wrong, or nothing."""
    for worker in range(WORKERS):
        rpc.rpc_sync(worker, draw_pauses, (seed,), timeout=LIMIT)
    rref: rpc.RRef[torch.Tensor] | None = None
    try:
        for rref, number in _steps(Random(seed)):
            if (found := fetch(rref)) != number:
                return f"the value {number} is {found}"
        del rref
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    left: list[int] = []

    def is_empty() -> bool:
        left[:] = [rpc.rpc_sync(each, count_owned, timeout=LIMIT) for each in range(WORKERS)]
        return not any(left)

    return "" if wait_until(is_empty, LIMIT) else f"values are left on the workers: {left}"


def _steps(chosen: Random) -> Iterator[tuple[rpc.RRef[torch.Tensor], int]]:
    """Make references, pass them around and drop them; yield those to fetch, and their values."""
    held: list[tuple[rpc.RRef[torch.Tensor], int]] = []
    for _ in range(chosen.randint(5, 25)):
        step, worker = chosen.randrange(6), chosen.randrange(WORKERS)
        if step == 0 or not held:
            owner, number = chosen.randrange(WORKERS), chosen.randrange(1000)
            call = owner, number, chosen.choice((1, 100, 100_000))
            held.append((rpc.rpc_sync(worker, create, call, timeout=LIMIT), number))
            continue
        rref, number = held.pop(chosen.randrange(len(held)))
        if step == 1:
            held.append((_send_around(worker, rref), number))
        elif step == 2:
            futures = [
                rpc.rpc_async(each, fetch, (rref,), timeout=LIMIT) for each in range(WORKERS)
            ]
            assert [each.wait() for each in futures] == [number] * WORKERS
            held.append((rref, number))
        elif step == 3:
            yield rref, number
        elif step == 4:
            held += [(rref, number), (_send_around(worker, rref), number)]
        del rref  # dropped in steps 3 and 5
    yield from held


def _send_around(worker: int, rref: rpc.RRef[torch.Tensor]) -> rpc.RRef[torch.Tensor]:
    passed: rpc.RRef[torch.Tensor] = rpc.rpc_sync(worker, pass_on, (rref,), timeout=LIMIT)
    return passed


def limit_of(numbers: range) -> float:
    """Return the seconds that programs may take."""
    return LIMIT * (2 + len(numbers))


def run_rank(trial: TrialRank, hosts: str, seed: int, numbers: range) -> list[str]:
    """Be a worker; worker 0 runs the programs and returns what went wrong."""
    os.environ["PHALANX_HOST_ID"] = hosts[trial.rank]
    trial.form("phalanx", LIMIT)
    rpc.init_rpc(f"worker-{trial.rank}")
    pauses()
    wrong = []
    if trial.rank == 0:
        for number in numbers:
            if problem := run_program(f"{seed} {number}"):
                wrong.append(f"program {number}: {problem}")
                break  # what it has left would disturb the next one
    rpc.shutdown(graceful=not wrong, timeout=limit_of(numbers))  # others wait here for worker 0
    dist.destroy_process_group()
    return wrong


def run(pool: Pool, hosts: str, seed: int, numbers: range) -> list[str]:
    """Run programs in new workers; return what went wrong, and replace the workers then."""
    pool.begin(WORKERS, run_rank, hosts, seed, numbers)
    answers = pool.finish(WORKERS, limit_of(numbers) + LIMIT)
    wrong = [
        f"programs from {numbers[0]} on, worker {rank}: {answer.error or 'it died or hung'}"
        for rank, answer in enumerate(answers)
        if answer.value is None
    ]
    wrong += [problem for answer in answers for problem in answer.value or ()]
    if wrong:
        for rank, answer in enumerate(answers):
            pool.replace(rank, has_died=answer.value is None and not answer.hung)
    return wrong
