"""An interrupted and resumed training equals an uninterrupted one, bitwise or by its samples."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from phalanx.parallel import SharedDataParallel
from phalanx.train import PREEMPTION_EXIT_CODE, Trainer
from tests.ranks import RankServer
from tests.trainings import (
    EPOCHS,
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    adam,
    build_model,
    halving,
    squared,
    synthetic_data,
)

pytestmark = pytest.mark.usefixtures("trainer_loaded")


# --- resuming -----------------------------------------------------------------------------------


class NumberedSamples(Dataset[Any]):
    """Samples with their indices, and with noise from all three random generators."""

    def __init__(self, seed: int) -> None:
        self.inputs, self.targets = synthetic_data(seed).tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return self.inputs[index] + 0.01 * noise, self.targets[index], index


class Centred(nn.Module):
    """Subtract the running mean: a buffer that differs between ranks, like that of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(17, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
            return inputs
        return inputs - self.mean


class RecordedTraining:
    """A training with all stateful parts, which records the samples of each step."""

    def __init__(self, seed: int, folder: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.seed, self.folder, self.wrap = seed, folder, wrap
        self.samples_by_step: list[list[int]] = []
        self.current_step: list[int] = []

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
        if model.training:
            self.current_step += batch[2].tolist()
        return squared(model, (batch[0], batch[1]))

    def end_step(self, step: int, metrics: dict[str, float]) -> None:
        self.samples_by_step.append(self.current_step)
        self.current_step = []

    def fit(self, checkpoints: str | None, **options: Any) -> Any:
        self.samples_by_step, self.current_step = [], []
        model = self.wrap(build_model(self.seed, nn.Dropout(0.3), Centred()))
        optimizer = adam(model)
        settings: dict[str, Any] = {
            "global_batch": GLOBAL_BATCH,
            "accumulate": 2,
            "epochs": EPOCHS,
            "scheduler": halving(optimizer),
            "on_step": self.end_step,
            "evaluate": synthetic_data(self.seed),
            **options,
        }
        if "steps" in options:
            del settings["epochs"]
        directory = None if checkpoints is None else os.path.join(self.folder, checkpoints)
        data = NumberedSamples(self.seed)
        settings = {"seed": self.seed, "checkpoints": directory, "progress": False, **settings}
        trainer = Trainer(model, optimizer, data, self.loss_or_evaluation_loss, **settings)
        result = trainer.fit()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return result, self.samples_by_step, state

    def loss_or_evaluation_loss(self, model: nn.Module, batch: Any) -> Any:
        return self.loss(model, batch) if len(batch) == 3 else squared(model, batch)


def stop_and_resume(seed: int, stops: list[int]) -> list[Any]:
    """Train without interruption, then with stops, each time resuming with a new model."""
    results = []
    wraps = (lambda model: model, DistributedDataParallel, SharedDataParallel)
    for number, wrap in enumerate(wraps):
        run = RecordedTraining(seed, os.environ["FOLDER"], wrap)
        uninterrupted = run.fit(None)
        losses: list[float] = []
        samples_by_step: list[list[int]] = []
        for stop in (*stops, None):
            limits = {} if stop is None else {"steps": stop}
            result, new_samples, state = run.fit(
                f"checkpoints-{number}", checkpoint_every=5, **limits
            )
            losses += result.losses
            samples_by_step += new_samples
        completed = run.fit(f"checkpoints-{number}")  # the run is complete already
        results.append((uninterrupted, (result, losses, samples_by_step, state), completed))
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_resumes_bit_for_bit(ranks: RankServer, world_size: int) -> None:
    seed = random.randrange(2**31)
    stops = sorted(random.sample(range(1, STEPS), 3))
    print(f"seed {seed}, stops {stops}")
    for results in ranks.run(world_size, stop_and_resume, seed, stops):
        for uninterrupted, (result, losses, samples_by_step, state), completed in results:
            assert losses == uninterrupted[0].losses
            assert samples_by_step == uninterrupted[1]
            assert (result.loss, result.step) == (uninterrupted[0].loss, STEPS)
            assert result.evaluation == uninterrupted[0].evaluation
            assert state.keys() == uninterrupted[2].keys()
            assert all(torch.equal(state[name], uninterrupted[2][name]) for name in state)
            assert completed[0].losses == []
            assert (completed[0].loss, completed[0].evaluation) == (result.loss, result.evaluation)


def resume(seed: int, folder: str, options: dict[str, Any]) -> Any:
    result, samples_by_step, _ = RecordedTraining(seed, folder, lambda model: model).fit(
        "checkpoints", **options
    )
    return result, samples_by_step


def samples_by_step_on_all_ranks(by_rank: list[Any]) -> list[list[int]]:
    """Return the samples of each step on all ranks, sorted."""
    return [
        sorted(chain(*parts))
        for parts in zip(*(samples_by_step for _, samples_by_step in by_rank), strict=True)
    ]


def test_other_world_size_uses_same_samples(ranks: RankServer, tmp_path: Path) -> None:
    """Train on two ranks, on three with another global batch, then on one, over two epochs."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    orders = [
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for epoch in range(EPOCHS)
    ]
    run = [str(tmp_path), {"steps": 5}]
    first = ranks.run(2, resume, seed, *run)
    second = ranks.run(3, resume, seed, str(tmp_path), {"steps": 8, "global_batch": 28})
    third = ranks.run(1, resume, seed, str(tmp_path), {})
    expected = [orders[0][at : at + 12] for at in range(0, 60, 12)]
    assert samples_by_step_on_all_ranks(first) == [sorted(part) for part in expected]
    expected = [orders[0][60:88], orders[0][88:116], orders[0][116:]]
    assert samples_by_step_on_all_ranks(second) == [sorted(part) for part in expected]
    expected = [orders[1][at : at + 12] for at in range(0, SAMPLES, 12)]
    assert samples_by_step_on_all_ranks(third) == [sorted(part) for part in expected]
    assert third[0][0].step == 8 + 12


# --- SIGTERM ------------------------------------------------------------------------------------


def train_until_sigterm(seed: int) -> list[float]:
    """Send SIGTERM to one rank; all ranks save and exit, and a new start resumes."""
    run = RecordedTraining(seed, os.environ["FOLDER"], lambda model: model)
    uninterrupted, *_ = run.fit(None)
    previous = signal.getsignal(signal.SIGTERM)

    def end_step(step: int, metrics: dict[str, float]) -> None:
        run.losses.append(metrics["loss"])  # type: ignore[attr-defined]
        if step == 7 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run.losses = []  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as raised:
        run.fit("checkpoints", on_step=end_step, checkpoint_every=1000)
    assert raised.value.code == PREEMPTION_EXIT_CODE == 143
    assert signal.getsignal(signal.SIGTERM) == previous
    assert len(run.losses) == 8  # type: ignore[attr-defined]
    result, *_ = run.fit("checkpoints")
    assert run.losses + result.losses == uninterrupted.losses  # type: ignore[attr-defined]
    return list(uninterrupted.losses)


def test_sigterm_saves_and_exits(ranks: RankServer) -> None:
    ranks.run(3, train_until_sigterm, random.randrange(2**31))


def train_with_workers_until_sigterm(seed: int) -> None:
    """Send SIGTERM to the process group, whose loader workers must finish their batches."""
    folder = os.environ["FOLDER"] + "/checkpoints"
    losses: list[float] = []

    def end_step(step: int, metrics: dict[str, float]) -> None:
        losses.append(metrics["loss"])
        if step == 2:
            os.killpg(os.getpgrp(), signal.SIGTERM)

    def fit(checkpoints: str | None, **options: Any) -> list[float]:
        model = build_model(seed)
        loader = {"num_workers": 1}
        settings: dict[str, Any] = {"global_batch": 12, "epochs": 1, "loader": loader, **options}
        data, optimizer = synthetic_data(seed), adam(model)
        return (
            Trainer(model, optimizer, data, squared, checkpoints=checkpoints, **settings)
            .fit()
            .losses
        )

    uninterrupted = fit(None)
    with pytest.raises(SystemExit) as raised:
        fit(folder, on_step=end_step)
    assert raised.value.code == PREEMPTION_EXIT_CODE
    assert losses + fit(folder) == uninterrupted


def test_sigterm_to_loader_workers(ranks: RankServer) -> None:
    ranks.run(2, train_with_workers_until_sigterm, random.randrange(2**31))


class SlowSamples(Dataset[Any]):
    """Samples of which some never become ready while a file exists."""

    def __init__(self, seed: int, slow: set[int], block_file: Path) -> None:
        self.tensors, self.slow, self.block_file = synthetic_data(seed).tensors, slow, block_file

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index in self.slow and self.block_file.exists():
            threading.Event().wait()
        return tuple(tensor[index] for tensor in self.tensors)


@contextmanager
def sigterm_while_waiting(losses: list[float], count: int) -> Iterator[None]:
    """Send SIGTERM to this process when it waits for a batch after `count` steps."""
    finished = threading.Event()

    def is_waiting() -> bool:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code.co_name != "_try_get_data":
            frame = frame.f_back
        return frame is not None and len(losses) == count

    def watch() -> None:
        while not is_waiting():
            if finished.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def train_until_sigterm_while_waiting(seed: int) -> None:
    """Interrupt one rank in the middle of an epoch, and both at the first batch of an epoch."""
    folder, rank = Path(os.environ["FOLDER"]), dist.get_rank()
    orders = [
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for epoch in range(EPOCHS)
    ]

    def fit(name: str, slow: set[int], **options: Any) -> list[float]:
        model = build_model(seed)
        settings: dict[str, Any] = {"epochs": EPOCHS, "loader": {"num_workers": 1}, **options}
        settings |= {"global_batch": GLOBAL_BATCH, "seed": seed, "checkpoints": folder / name}
        data = SlowSamples(seed, slow, folder / f"block-{rank}")
        return Trainer(model, adam(model), data, squared, **settings).fit().losses

    uninterrupted = fit("whole", set())
    in_epoch = STEPS // EPOCHS
    # The second half of step 4 is rank 1's, which waits for it before the ranks synchronize step 3.
    for name, slow, signalled_ranks, previous, expected_steps in (
        ("middle", {orders[0][3 * GLOBAL_BATCH + GLOBAL_BATCH // 2]}, {1}, 2, 3),
        ("first", {orders[1][0], orders[1][GLOBAL_BATCH // 2]}, {0, 1}, in_epoch, in_epoch),
    ):
        losses: list[float] = []
        block_file = folder / f"block-{rank}"

        def end_step(
            step: int,
            metrics: dict[str, float],
            losses: list[float] = losses,
            block_file: Path = block_file,
        ) -> None:
            losses.append(metrics["loss"])
            if step == in_epoch:
                block_file.touch()

        if name == "middle":
            block_file.touch()
        count = previous if rank in signalled_ranks else -1
        with pytest.raises(SystemExit) as raised, sigterm_while_waiting(losses, count):
            fit(name, slow, on_step=end_step, checkpoint_every=1000)
        assert raised.value.code == PREEMPTION_EXIT_CODE
        assert len(losses) == expected_steps
        block_file.unlink(missing_ok=True)
        assert losses + fit(name, slow) == uninterrupted


def test_sigterm_while_waiting_for_batch(ranks: RankServer) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    ranks.run(2, train_until_sigterm_while_waiting, seed)
