"""Schedules: random programs, with pauses where threads hand over.

Whatever the order in which threads come to their turn, nothing may be lost and nothing may hang.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from random import Random
from types import ModuleType

import torch.distributed as dist

from phalanx import rpc
from tests.fault_injection import schedule_launchers, schedule_references, schedule_tables
from tests.fault_injection.pauses import LIMIT, WORKERS, Pauses
from tests.fault_injection.pool import Pool, TrialRank

KINDS: dict[str, ModuleType] = {
    "references": schedule_references,
    "tables": schedule_tables,
    "launchers": schedule_launchers,
}
"""The kinds of programs.

Each module has `HAND_OVERS`, the methods that go on with what another thread has begun, and
`run_program`, which returns what went wrong, or nothing. Programs of `launchers` have their own
threads; those of the others run on worker 0 of a group of RPC.
"""
BATCH = 100
"""The number of programs of one group of workers."""


@functools.cache
def pauses(kind: str) -> Pauses:
    """Return the pauses of this process in programs of a kind, which begin with the first call."""
    return Pauses(KINDS[kind].HAND_OVERS)


def draw_pauses(kind: str, seed: str) -> None:
    """Draw the pauses of this worker."""
    pauses(kind).draw(f"{seed} {rpc.get_worker_info().id}")


def limit_of(numbers: range) -> float:
    """Return the seconds that programs may take."""
    return LIMIT * (2 + len(numbers))


def run_rank(trial: TrialRank, kind: str, hosts: str, seed: int, numbers: range) -> list[str]:
    """Run programs, or be a worker that takes part in them; return what went wrong."""
    if kind == "launchers":
        return run_programs(kind, seed, numbers[trial.rank :: trial.size], pauses(kind).draw)
    os.environ["PHALANX_HOST_ID"] = hosts[trial.rank]
    trial.form("phalanx", LIMIT)
    rpc.init_rpc(f"worker-{trial.rank}")
    pauses(kind)

    def draw(program: str) -> None:
        for worker in range(WORKERS):
            rpc.rpc_sync(worker, draw_pauses, (kind, program), timeout=LIMIT)

    wrong = run_programs(kind, seed, numbers, draw) if trial.rank == 0 else []
    rpc.shutdown(graceful=not wrong, timeout=limit_of(numbers))  # others wait here for worker 0
    dist.destroy_process_group()
    return wrong


def run_programs(kind: str, seed: int, numbers: range, draw: Callable[[str], object]) -> list[str]:
    """Run programs up to the first that goes wrong, as what it leaves would disturb the next."""
    for number in numbers:
        program = f"{seed} {number}"
        draw(program)
        if problem := KINDS[kind].run_program(Random(program)):
            return [f"program {number} of {kind}: {problem}"]
    return []


def run(pool: Pool, kind: str, numbers: range, hosts: str, seed: int) -> list[str]:
    """Run programs in new workers; return what went wrong, and replace the workers then."""
    pool.begin(WORKERS, run_rank, kind, hosts, seed, numbers)
    answers = pool.finish(WORKERS, limit_of(numbers) + LIMIT)
    wrong = [
        f"programs of {kind} from {numbers[0]} on, worker {rank}: "
        f"{answer.error or 'it died or hung'}"
        for rank, answer in enumerate(answers)
        if answer.value is None
    ]
    wrong += [problem for answer in answers for problem in answer.value or ()]
    if wrong:
        for rank, answer in enumerate(answers):
            pool.replace(rank, has_died=answer.value is None and not answer.hung)
    return wrong
