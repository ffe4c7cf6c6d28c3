"""Healthy jobs on Gloo: while they run, `phalanx explain` must find no fault.

`python -m tests.fault_injection.healthy NAME` runs one rank of a program. `run` starts a job of it
beside busy processes, and explains it again and again until it ends.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx.diagnosis.job_reader import read_job_directory
from phalanx.diagnosis.kinds import diagnose
from phalanx.recorder.job_directory import JobDirectory, list_job_names
from tests import copies

SECONDS = 6.0
"""The time for which a program runs."""

_ROOT = Path(__file__).parents[2]
_COMMAND = (copies.PHALANX,)
_PAUSE = 0.2
_LIMIT = 240.0
_HEALTHY = ("running", "ended")
_FORMING = ("unknown", "missing")
"""The kinds of healthy jobs, and those that are right too before any rank has formed a group."""


def _make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def _train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in _steps():
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _steps() -> Iterator[int]:
    """Yield the numbers of steps until rank 0 says that the time is over."""
    end, step = time.monotonic() + SECONDS, 0
    while True:
        goes_on = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(goes_on, 0)
        if not goes_on:
            return
        yield step
        step += 1


def train_with_ddp() -> None:
    _train(DistributedDataParallel(_make_model()))


def train_with_fsdp() -> None:
    model = _make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    _train(fully_shard(model))


def run_pipeline() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = torch.ones(8, 64)
    for _ in _steps():
        for _ in range(4):
            if rank > 0:
                dist.recv(batch, rank - 1)
            time.sleep(0.002)
            if rank < size - 1:
                dist.send(batch, rank + 1)


def use_groups_and_asynchronous_works() -> None:
    halves = [dist.new_group([0, 1]), dist.new_group(), dist.new_group()]
    for step in _steps():
        works = [dist.all_reduce(torch.ones(1000), async_op=True, group=g) for g in halves[1:]]
        if dist.get_rank() < 2 and step % 2:
            dist.all_reduce(torch.ones(4), group=halves[0])
        for work in works:
            work.wait()
        dist.all_gather_object([None] * dist.get_world_size(), step)


def call_other_workers() -> None:
    import phalanx.rpc as rpc

    rank, size = dist.get_rank(), dist.get_world_size()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    for step in _steps():
        rpc.rpc_sync(f"worker{(rank + 1) % size}", torch.add, args=(torch.ones(100), step))
    rpc.shutdown()


PROGRAMS: dict[str, Callable[[], None]] = {
    "DDP": train_with_ddp,
    "FSDP2": train_with_fsdp,
    "pipeline": run_pipeline,
    "groups": use_groups_and_asynchronous_works,
    "RPC": call_other_workers,
}


@dataclass(frozen=True)
class Run:
    """A drawn run: its number, program, world size and the number of busy processes beside it."""

    number: int
    program: str
    ranks: int
    load: int


@dataclass
class Trial:
    """The results of one run: the kinds of its explanations, and those that were wrong."""

    run: Run
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def draw(seed: int, number: int) -> Run:
    """Draw the run with this number."""
    rng = random.Random(f"{seed} {number}")
    program = list(PROGRAMS)[number % len(PROGRAMS)]
    return Run(number, program, rng.randint(2, 4), rng.randint(0, 2))


def run(drawn: Run, folder: Path) -> Trial:
    """Run a job and explain it until its end; its directory is below `folder`."""
    trial, jobs = Trial(drawn), folder / str(drawn.number)
    command = [*_COMMAND, "run", "--nproc-per-node", str(drawn.ranks)]
    with _load(drawn.load):
        process = subprocess.Popen(
            [*command, "-m", "tests.fault_injection.healthy", drawn.program],
            stderr=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PHALANX_JOBS_DIR": str(jobs)},
        )
        end = time.monotonic() + _LIMIT
        while process.poll() is None and time.monotonic() < end:
            _explain(trial, str(jobs))
            time.sleep(_PAUSE)
        process.kill()
        _, errors = process.communicate()
    if process.returncode:
        trial.wrong.append(f"ended with {process.returncode}: {errors[-2000:]}")
    return trial


def _explain(trial: Trial, jobs: str) -> None:
    for name in list_job_names(jobs) if os.path.isdir(jobs) else ():
        try:
            with JobDirectory(jobs, name) as job:
                diagnosis = diagnose(read_job_directory(job))
        except FileNotFoundError:  # the job has just ended
            return
        trial.kinds[diagnosis.kind] += 1
        ranks = diagnosis.graph.ranks.values()
        has_formed = any(group.identity for rank in ranks for group in rank.groups)
        if diagnosis.kind not in (_HEALTHY if has_formed else (*_HEALTHY, *_FORMING)):
            trial.wrong.append(" ".join(diagnosis.describe()))


@contextmanager
def _load(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main(name: str) -> None:
    """Run one rank of a program."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    PROGRAMS[name]()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
