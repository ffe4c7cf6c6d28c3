"""Kills during training: a run that is killed and restarted ends like an undisturbed run.

A run is 50 short epochs of a `Trainer` that saves every few steps. At a random moment between the
first and the last instruction of its ranks, one rank or all ranks are killed. The run is then
restarted from its checkpoints and killed again, as often as was drawn. In the end, its loss, its
evaluation and its parameters must equal those of an undisturbed run, bit for bit. Moments are
defined by the checkpoints on the disk plus a short delay, so that they do not depend on the load of
the machine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from phalanx.testing.fork_server import Task
from phalanx.testing.processes import ForkServer, RankProcesses
from phalanx.train import Trainer

EPOCHS = 50
# An epoch has five steps, the last with 3 samples; checkpoints fall on every step of it.
SAMPLES, GLOBAL_BATCH, EVERY = 35, 8, 3
# Timeout of a group in seconds, and the seconds that survivors have to end.
TIMEOUT, GRACE = 20.0, 60.0

Outcome = tuple[float, dict[str, float], str]
"""The loss of the last step, the last evaluation, and a digest of the parameters."""


@dataclass(frozen=True)
class Kill:
    """The moment at which ranks are killed, and the ranks."""

    moment: float
    """Fraction of all steps that must be saved before; 0 kills ranks that are starting."""
    delay: float
    """Further delay in seconds."""
    victims: tuple[int, ...]


@dataclass
class Trial:
    """A run that is killed and restarted, and its results."""

    number: int
    ranks: int
    uses_ddp: bool
    kills: list[Kill]
    effective_kills: int = 0
    """Number of kills that hit running ranks."""
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(
            f"{kill.victims} {kill.delay:.3f} s after {kill.moment:.0%}" for kill in self.kills
        )
        return f"{self.ranks} ranks, {'DDP' if self.uses_ddp else 'plain'}: {kills}"


def draw(seed: int, number: int, kills: int) -> Trial:
    """Draw trial `number` of a seed, with at most `kills` kills."""
    random = Random(f"{seed} training {number}")
    ranks = random.choice((2, 2, 3))
    drawn = []
    for moment in sorted(random.random() for _ in range(random.randint(1, kills))):
        everyone = random.random() < 0.25
        victims = tuple(range(ranks)) if everyone else (random.randrange(ranks),)
        if random.random() < 0.2:
            drawn.append(Kill(0.0, random.uniform(0, 1.0), victims))
        else:
            drawn.append(Kill(moment, random.uniform(0, 0.1), victims))
    return Trial(number, ranks, random.random() < 0.5, drawn)


def train(folder: str, store: str, uses_ddp: bool, epochs: int) -> Outcome:
    """Train on one rank."""
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=TIMEOUT),
    )
    torch.manual_seed(1)
    inputs = torch.randn(SAMPLES, 5)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    model: nn.Module = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
    if uses_ddp:
        model = DistributedDataParallel(model)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    result = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        data,
        loss,
        global_batch=GLOBAL_BATCH,
        epochs=epochs,
        evaluate=data,
        checkpoints=folder,
        checkpoint_every=EVERY,
        progress=False,
    ).fit()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    dist.destroy_process_group()
    return result.loss, result.evaluation, digest.hexdigest()


class TrainingRunner:
    """A runner of trials on ranks of one fork server; a context manager."""

    def __init__(self, epochs: int = EPOCHS) -> None:
        self._epochs = epochs
        self._server = ForkServer(["numpy", "torch._dynamo"])
        self._server.preload("phalanx.train")  # now, since trials are timed
        self._expected: dict[tuple[int, bool], Outcome] = {}

    def __enter__(self) -> TrainingRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def run(self, trial: Trial) -> Trial:
        """Run a trial, add its results and return it."""
        expected = self._expected_outcome(trial.ranks, trial.uses_ddp)
        with _folder() as folder:
            for kill in trial.kills:
                if self._run_and_kill(trial, folder, kill):
                    trial.effective_kills += 1
                if trial.wrong:
                    return trial
            outcomes = self._finish(trial, folder)
        if outcomes is not None and any(outcome != expected for outcome in outcomes):
            trial.wrong.append(f"ended with {outcomes}, expected {expected} on every rank")
        return trial

    def _expected_outcome(self, ranks: int, uses_ddp: bool) -> Outcome:
        """Return the outcome of an undisturbed run."""
        if (ranks, uses_ddp) not in self._expected:
            trial = Trial(-1, ranks, uses_ddp, [])
            with _folder() as folder:
                outcomes = self._finish(trial, folder)
            if outcomes is None:
                raise RuntimeError(f"an undisturbed run failed: {trial.wrong}")
            self._expected[ranks, uses_ddp] = outcomes[0]
        return self._expected[ranks, uses_ddp]

    def _start(self, trial: Trial, folder: Path) -> RankProcesses:
        attempt = tempfile.mkdtemp(dir=folder)
        arguments = str(folder / "checkpoints"), f"{attempt}/store", trial.uses_ddp, self._epochs
        pickled = cloudpickle.dumps((train, arguments, {}))
        return self._server.start(
            [
                Task(
                    pickled,
                    attempt,
                    rank,
                    {"RANK": str(rank), "WORLD_SIZE": str(trial.ranks)},
                    skips_finalization=True,
                )
                for rank in range(trial.ranks)
            ]
        )

    def _run_and_kill(self, trial: Trial, folder: Path, kill: Kill) -> bool:
        """Kill ranks at the moment; return whether any was running. The survivors must end."""
        ranks = self._start(trial, folder)
        target = kill.moment * self._epochs * -(-SAMPLES // GLOBAL_BATCH)
        deadline = time.monotonic() + GRACE
        running = ranks.wait(0)
        while running and _latest_step(folder) < target and time.monotonic() < deadline:
            running = ranks.wait(0.002)
        running = ranks.wait(kill.delay)
        victims = [rank for rank in kill.victims if rank in running]
        for rank in victims:
            ranks.signal(rank, signal.SIGKILL)
        hung = ranks.wait(GRACE)
        ranks.kill(hung)
        for ended in ranks.collect(hung):
            if ended.rank not in victims and (ended.hung or not (victims or ended.returned)):
                trial.wrong.append(str(ended))
        return bool(victims)

    def _finish(self, trial: Trial, folder: Path) -> list[Any] | None:
        """Run to the end; return the values of all ranks, or None if a rank failed."""
        ranks = self._start(trial, folder)
        hung = ranks.wait(GRACE)
        ranks.kill(hung)
        results = ranks.collect(hung)
        trial.wrong += [str(ended) for ended in results if not ended.returned]
        return None if trial.wrong else [ended.value for ended in results]


def _latest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    names = (path.name for path in folder.glob("checkpoints/[0-9]*-step-*"))
    return max((int(name.rpartition("-")[2]) for name in names), default=0)


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="phalanx-training-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)
