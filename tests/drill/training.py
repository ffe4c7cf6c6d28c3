"""Deaths in training: whatever is killed whenever, the run goes on and ends as if nothing had been.

A run is 50 short epochs of a `Trainer` on some ranks, which saves every few steps. At a random
moment, from the first instruction of its ranks to their last, one of them or all are killed; then
it is started again from what is on the disk, and killed again, as often as was drawn. In the end
its loss, its evaluation and its parameters must be those of a run that nobody disturbed, bit for
bit. Moments are counted by the checkpoints on the disk, and a short while more, so that they don't
depend on how busy the machine is.
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
from phalanx.testing.processes import ForkServer, Ranks
from phalanx.train import Trainer

EPOCHS = 50
# Five steps in an epoch, the last with 3 samples; checkpoints fall on every place in it.
SAMPLES, GLOBAL_BATCH, EVERY = 35, 8, 3
# Seconds of a group's timeout, and that survivors have to end.
TIMEOUT, PATIENCE = 20.0, 60.0

Ending = tuple[float, dict[str, float], str]
"""The loss of the last step, the last evaluation, and a digest of the parameters."""


@dataclass(frozen=True)
class Blow:
    """When an attempt is struck, and who."""

    moment: float
    """The part of all steps of which there must be checkpoints; 0 strikes ranks that just start."""
    delay: float
    """Seconds after that."""
    victims: tuple[int, ...]


@dataclass
class Trial:
    """A run that was killed and started again, and what it came to."""

    number: int
    ranks: int
    wrapped: bool
    blows: list[Blow]
    landed: int = 0
    """How many of the blows struck ranks that still ran."""
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        blows = ", ".join(
            f"{blow.victims} {blow.delay:.3f} s after {blow.moment:.0%}" for blow in self.blows
        )
        return f"{self.ranks} ranks, {'DDP' if self.wrapped else 'plain'}: {blows}"


def draw(seed: int, number: int, blows: int) -> Trial:
    """Trial `number` of a seed, with at most so many blows."""
    random = Random(f"{seed} training {number}")
    ranks = random.choice((2, 2, 3))
    drawn = []
    for moment in sorted(random.random() for _ in range(random.randint(1, blows))):
        everyone = random.random() < 0.25
        victims = tuple(range(ranks)) if everyone else (random.randrange(ranks),)
        if random.random() < 0.2:
            drawn.append(Blow(0.0, random.uniform(0, 1.0), victims))
        else:
            drawn.append(Blow(moment, random.uniform(0, 0.1), victims))
    return Trial(number, ranks, random.random() < 0.5, drawn)


def train(folder: str, store: str, wrapped: bool, epochs: int) -> Ending:
    """What each rank runs."""
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
    if wrapped:
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


class Drill:
    """Runs trials of so many epochs on ranks that one server forks; a context manager."""

    def __init__(self, epochs: int = EPOCHS) -> None:
        self._epochs = epochs
        self._server = ForkServer(["numpy", "torch._dynamo"])
        self._server.preload("phalanx.train")  # it is ready then: trials are timed
        self._expected: dict[tuple[int, bool], Ending] = {}

    def __enter__(self) -> Drill:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def run(self, trial: Trial) -> Trial:
        """Run a trial; what is wrong is in it afterwards."""
        ending = self._undisturbed(trial.ranks, trial.wrapped)
        with _folder() as folder:
            for blow in trial.blows:
                if self._struck(trial, folder, blow):
                    trial.landed += 1
                if trial.wrong:
                    return trial
            ends = self._finish(trial, folder)
        if ends is not None and any(end != ending for end in ends):
            trial.wrong.append(f"ended with {ends}, expected {ending} on every rank")
        return trial

    def _undisturbed(self, ranks: int, wrapped: bool) -> Ending:
        """How a run ends that nobody disturbs."""
        if (ranks, wrapped) not in self._expected:
            trial = Trial(-1, ranks, wrapped, [])
            with _folder() as folder:
                ends = self._finish(trial, folder)
            if ends is None:
                raise RuntimeError(f"a run that nobody disturbs fails: {trial.wrong}")
            self._expected[ranks, wrapped] = ends[0]
        return self._expected[ranks, wrapped]

    def _start(self, trial: Trial, folder: Path) -> Ranks:
        attempt = tempfile.mkdtemp(dir=folder)
        arguments = str(folder / "checkpoints"), f"{attempt}/store", trial.wrapped, self._epochs
        pickled = cloudpickle.dumps((train, arguments, {}))
        return self._server.start(
            [
                Task(
                    pickled,
                    attempt,
                    rank,
                    {"RANK": str(rank), "WORLD_SIZE": str(trial.ranks)},
                    brief=True,
                )
                for rank in range(trial.ranks)
            ]
        )

    def _struck(self, trial: Trial, folder: Path, blow: Blow) -> bool:
        """Kill at the moment; returns whether somebody still ran. The survivors must end."""
        ranks = self._start(trial, folder)
        target = blow.moment * self._epochs * -(-SAMPLES // GLOBAL_BATCH)
        deadline = time.monotonic() + PATIENCE
        running = ranks.wait(0)
        while running and _saved(folder) < target and time.monotonic() < deadline:
            running = ranks.wait(0.002)
        running = ranks.wait(blow.delay)
        victims = [rank for rank in blow.victims if rank in running]
        for rank in victims:
            ranks.signal(rank, signal.SIGKILL)
        hung = ranks.wait(PATIENCE)
        ranks.end(hung)
        for ended in ranks.collect(hung):
            if ended.rank not in victims and (ended.hung or not (victims or ended.returned)):
                trial.wrong.append(str(ended))
        return bool(victims)

    def _finish(self, trial: Trial, folder: Path) -> list[Any] | None:
        """Let a run come to its end; what every rank returned, None if one didn't."""
        ranks = self._start(trial, folder)
        hung = ranks.wait(PATIENCE)
        ranks.end(hung)
        every = ranks.collect(hung)
        trial.wrong += [str(ended) for ended in every if not ended.returned]
        return None if trial.wrong else [ended.value for ended in every]


def _saved(folder: Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    names = (path.name for path in folder.glob("checkpoints/[0-9]*-step-*"))
    return max((int(name.rpartition("-")[2]) for name in names), default=0)


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="phalanx-training-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)
