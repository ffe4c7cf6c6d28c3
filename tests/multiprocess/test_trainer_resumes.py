"""The trainer is stopped, and goes on as if it had not been: bit for bit, or sample for sample."""

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
from phalanx.train import STOPPED, Trainer
from tests.ranks import RankServer
from tests.trainings import (
    EPOCHS,
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    adam,
    halving,
    made_data,
    made_model,
    squared,
)

pytestmark = pytest.mark.usefixtures("trainer_loaded")


# --- resuming -----------------------------------------------------------------------------------


class Numbered(Dataset[Any]):
    """Samples that say which they are, one by one, with noise from all three random generators."""

    def __init__(self, seed: int) -> None:
        self.inputs, self.targets = made_data(seed).tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return self.inputs[index] + 0.01 * noise, self.targets[index], index


class Centre(nn.Module):
    """Takes the running mean away: a buffer that differs between ranks, as that of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(17, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
            return inputs
        return inputs - self.mean


class Recorded:
    """Trains with everything that has a state, and notes which samples it saw at which step."""

    def __init__(self, seed: int, folder: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.seed, self.folder, self.wrap = seed, folder, wrap
        self.seen: list[list[int]] = []
        self.fresh: list[int] = []

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
        if model.training:
            self.fresh += batch[2].tolist()
        return squared(model, (batch[0], batch[1]))

    def end_step(self, step: int, metrics: dict[str, float]) -> None:
        self.seen.append(self.fresh)
        self.fresh = []

    def fit(self, checkpoints: str | None, **options: Any) -> Any:
        self.seen, self.fresh = [], []
        model = self.wrap(made_model(self.seed, nn.Dropout(0.3), Centre()))
        optimizer = adam(model)
        settings: dict[str, Any] = {
            "global_batch": GLOBAL_BATCH,
            "accumulate": 2,
            "epochs": EPOCHS,
            "scheduler": halving(optimizer),
            "on_step": self.end_step,
            "evaluate": made_data(self.seed),
            **options,
        }
        if "steps" in options:
            del settings["epochs"]
        directory = None if checkpoints is None else os.path.join(self.folder, checkpoints)
        data = Numbered(self.seed)
        settings = {"seed": self.seed, "checkpoints": directory, "progress": False, **settings}
        trainer = Trainer(model, optimizer, data, self.evaluated_or_not, **settings)
        result = trainer.fit()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return result, self.seen, state

    def evaluated_or_not(self, model: nn.Module, batch: Any) -> Any:
        return self.loss(model, batch) if len(batch) == 3 else squared(model, batch)


def stop_and_resume(seed: int, stops: list[int]) -> list[Any]:
    """Train in one go; then with stops, each time with a new model that loads what was saved."""
    found = []
    wraps = (lambda model: model, DistributedDataParallel, SharedDataParallel)
    for number, wrap in enumerate(wraps):
        run = Recorded(seed, os.environ["FOLDER"], wrap)
        whole = run.fit(None)
        losses: list[float] = []
        seen: list[list[int]] = []
        for stop in (*stops, None):
            ends = {} if stop is None else {"steps": stop}
            result, more, state = run.fit(f"checkpoints-{number}", checkpoint_every=5, **ends)
            losses += result.losses
            seen += more
        again = run.fit(f"checkpoints-{number}")  # of a run that has ended
        found.append((whole, (result, losses, seen, state), again))
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_resumes_bit_for_bit(ranks: RankServer, world_size: int) -> None:
    seed = random.randrange(2**31)
    stops = sorted(random.sample(range(1, STEPS), 3))
    print(f"seed {seed}, stops {stops}")
    for found in ranks.run(world_size, stop_and_resume, seed, stops):
        for whole, (result, losses, seen, state), again in found:
            assert losses == whole[0].losses
            assert seen == whole[1]
            assert (result.loss, result.step) == (whole[0].loss, STEPS)
            assert result.evaluation == whole[0].evaluation
            assert state.keys() == whole[2].keys()
            assert all(torch.equal(state[name], whole[2][name]) for name in state)
            assert again[0].losses == []
            assert (again[0].loss, again[0].evaluation) == (result.loss, result.evaluation)


def go_on(seed: int, folder: str, options: dict[str, Any]) -> Any:
    result, seen, _ = Recorded(seed, folder, lambda model: model).fit("checkpoints", **options)
    return result, seen


def samples_of(every: list[Any]) -> list[list[int]]:
    """The samples of each step on all ranks, sorted."""
    return [sorted(chain(*parts)) for parts in zip(*(seen for _, seen in every), strict=True)]


def test_another_world_size_sees_the_same_samples(ranks: RankServer, tmp_path: Path) -> None:
    """Two ranks, then three with another global batch, then one, over two epochs."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    orders = [
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for epoch in range(EPOCHS)
    ]
    run = [str(tmp_path), {"steps": 5}]
    first = ranks.run(2, go_on, seed, *run)
    second = ranks.run(3, go_on, seed, str(tmp_path), {"steps": 8, "global_batch": 28})
    third = ranks.run(1, go_on, seed, str(tmp_path), {})
    expected = [orders[0][at : at + 12] for at in range(0, 60, 12)]
    assert samples_of(first) == [sorted(part) for part in expected]
    expected = [orders[0][60:88], orders[0][88:116], orders[0][116:]]
    assert samples_of(second) == [sorted(part) for part in expected]
    expected = [orders[1][at : at + 12] for at in range(0, SAMPLES, 12)]
    assert samples_of(third) == [sorted(part) for part in expected]
    assert third[0][0].step == 8 + 12


# --- SIGTERM ------------------------------------------------------------------------------------


def asked_to_stop(seed: int) -> list[float]:
    """One rank gets SIGTERM in the middle; all save, leave, and a new start goes on."""
    run = Recorded(seed, os.environ["FOLDER"], lambda model: model)
    whole, *_ = run.fit(None)
    before = signal.getsignal(signal.SIGTERM)

    def end_step(step: int, metrics: dict[str, float]) -> None:
        run.losses.append(metrics["loss"])  # type: ignore[attr-defined]
        if step == 7 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run.losses = []  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as left:
        run.fit("checkpoints", on_step=end_step, checkpoint_every=1000)
    assert left.value.code == STOPPED == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(run.losses) == 8  # type: ignore[attr-defined]
    result, *_ = run.fit("checkpoints")
    assert run.losses + result.losses == whole.losses  # type: ignore[attr-defined]
    return list(whole.losses)


def test_sigterm_saves_and_leaves(ranks: RankServer) -> None:
    ranks.run(3, asked_to_stop, random.randrange(2**31))


def stopped_with_workers(seed: int) -> None:
    """A launcher's SIGTERM reaches the processes of the loader too; their batches are needed."""
    folder = os.environ["FOLDER"] + "/checkpoints"
    losses: list[float] = []

    def end_step(step: int, metrics: dict[str, float]) -> None:
        losses.append(metrics["loss"])
        if step == 2:
            os.killpg(os.getpgrp(), signal.SIGTERM)

    def fit(checkpoints: str | None, **options: Any) -> list[float]:
        model = made_model(seed)
        loader = {"num_workers": 1}
        settings: dict[str, Any] = {"global_batch": 12, "epochs": 1, "loader": loader, **options}
        data, optimizer = made_data(seed), adam(model)
        return (
            Trainer(model, optimizer, data, squared, checkpoints=checkpoints, **settings)
            .fit()
            .losses
        )

    whole = fit(None)
    with pytest.raises(SystemExit) as left:
        fit(folder, on_step=end_step)
    assert left.value.code == STOPPED
    assert losses + fit(folder) == whole


def test_sigterm_to_the_workers_of_the_loader(ranks: RankServer) -> None:
    ranks.run(2, stopped_with_workers, random.randrange(2**31))


class Slow(Dataset[Any]):
    """Some samples take for ever, as long as a file is there."""

    def __init__(self, seed: int, slow: set[int], gate: Path) -> None:
        self.tensors, self.slow, self.gate = made_data(seed).tensors, slow, gate

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index in self.slow and self.gate.exists():
            threading.Event().wait()
        return tuple(tensor[index] for tensor in self.tensors)


@contextmanager
def asked_when_it_waits(losses: list[float], count: int) -> Iterator[None]:
    """SIGTERM for this process when it waits for a batch, once it has made so many steps."""
    gone = threading.Event()

    def waits() -> bool:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code.co_name != "_try_get_data":
            frame = frame.f_back
        return frame is not None and len(losses) == count

    def look() -> None:
        while not waits():
            if gone.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        gone.set()
        thread.join()


def stopped_while_waiting(seed: int) -> None:
    """In the middle of an epoch on one rank, and at an epoch's first batch on both."""
    folder, rank = Path(os.environ["FOLDER"]), dist.get_rank()
    orders = [
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for epoch in range(EPOCHS)
    ]

    def fit(name: str, slow: set[int], **options: Any) -> list[float]:
        model = made_model(seed)
        settings: dict[str, Any] = {"epochs": EPOCHS, "loader": {"num_workers": 1}, **options}
        settings |= {"global_batch": GLOBAL_BATCH, "seed": seed, "checkpoints": folder / name}
        data = Slow(seed, slow, folder / f"gate-{rank}")
        return Trainer(model, adam(model), data, squared, **settings).fit().losses

    whole = fit("whole", set())
    in_epoch = STEPS // EPOCHS
    # Of step 4 the second half is rank 1's; the wait for it is before ranks agree on step 3.
    for name, slow, askers, before, made in (
        ("middle", {orders[0][3 * GLOBAL_BATCH + GLOBAL_BATCH // 2]}, {1}, 2, 3),
        ("first", {orders[1][0], orders[1][GLOBAL_BATCH // 2]}, {0, 1}, in_epoch, in_epoch),
    ):
        losses: list[float] = []
        gate = folder / f"gate-{rank}"

        def end_step(
            step: int, metrics: dict[str, float], losses: list[float] = losses, gate: Path = gate
        ) -> None:
            losses.append(metrics["loss"])
            if step == in_epoch:
                gate.touch()

        if name == "middle":
            gate.touch()
        count = before if rank in askers else -1
        with pytest.raises(SystemExit) as left, asked_when_it_waits(losses, count):
            fit(name, slow, on_step=end_step, checkpoint_every=1000)
        assert left.value.code == STOPPED
        assert len(losses) == made
        gate.unlink(missing_ok=True)
        assert losses + fit(name, slow) == whole


def test_sigterm_while_a_batch_is_awaited(ranks: RankServer) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    ranks.run(2, stopped_while_waiting, seed)
