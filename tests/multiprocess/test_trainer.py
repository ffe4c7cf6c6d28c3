"""The trainer on real ranks, against a plain loop in one process that knows nothing of it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from phalanx.errors import UsageError
from phalanx.observe import recording
from phalanx.observe.boxes import read_box
from phalanx.observe.own import waited
from phalanx.train import STOPPED, Trainer
from tests.ranks import RankServer

# 11 steps of 12 samples in an epoch, and a last one with 5, which leaves some ranks without any.
SAMPLES, GLOBAL_BATCH, EPOCHS = 137, 12, 2
STEPS = 12 * EPOCHS


@pytest.fixture(autouse=True)
def preloaded(ranks: RankServer) -> None:
    """The first step of an optimizer imports it."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.train")


def made_data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :3].sin().sum(1) + 0.1 * inputs[:, 3])


def made_model(seed: int, *extra: nn.Module) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), *extra, nn.Linear(17, 1)).double()


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = batch
    errors = model(inputs)[:, 0] - targets
    return errors.square().mean(), {"absolute": errors.abs().mean()}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)


# --- the same training as in one process -------------------------------------------------------


def oracle(seed: int, clip: float) -> tuple[list[float], list[Tensor], float]:
    """Losses, parameters and the loss over all samples, of a loop that a user writes."""
    inputs, targets = made_data(seed).tensors
    model = made_model(seed)
    optimizer = adam(model)
    scheduler = halving(optimizer)
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + epoch))
        for part in order.split(GLOBAL_BATCH):
            optimizer.zero_grad()
            loss = (model(inputs[part])[:, 0] - targets[part]).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    with torch.no_grad():
        final = (model(inputs)[:, 0] - targets).square().mean().item()
    return losses, [parameter.detach() for parameter in model.parameters()], final


def train_all_ways(seed: int) -> list[Any]:
    """Train with plain modules and DDP, in one and in several micro-batches."""
    found = []
    for wrap in (lambda model: model, DistributedDataParallel):
        for accumulate in (1, 3):
            model = made_model(seed + dist.get_rank())  # rank 0's counts
            whole = wrap(model)
            optimizer = adam(whole)
            seen: list[tuple[int, dict[str, float]]] = []
            result = Trainer(
                whole,
                optimizer,
                made_data(seed),
                squared,
                global_batch=GLOBAL_BATCH,
                epochs=EPOCHS,
                accumulate=accumulate,
                clip=0.5,
                scheduler=halving(optimizer),
                evaluate=made_data(seed),
                seed=seed,
                on_step=lambda step, metrics, seen=seen: seen.append((step, metrics)),  # type: ignore[misc]
            ).fit()
            parameters = [parameter.detach() for parameter in model.parameters()]
            found.append((result, parameters, seen))
    return found


def on_gloo(seed: int) -> list[Any]:
    store = dist.FileStore(os.environ["FOLDER"] + "/gloo", 2)
    rank = int(os.environ["RANK"])
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    try:
        return train_all_ways(seed)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("place", ["1", "2", "4", "2 on gloo"])
def test_equals_a_plain_loop(ranks: RankServer, place: str) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    losses, parameters, final = oracle(seed, clip=0.5)
    world_size, gloo = int(place[0]), "gloo" in place
    if gloo:
        every = ranks.run(world_size, on_gloo, seed, timeout=None)
    else:
        every = ranks.run(world_size, train_all_ways, seed)
    for found in every:
        assert len(found) == 4
        for result, own, seen in found:
            assert (result.step, result.epoch) == (STEPS, EPOCHS)
            assert result.losses == pytest.approx(losses, rel=1e-9)
            assert result.loss == result.losses[-1]
            assert result.evaluation["loss"] == pytest.approx(final, rel=1e-9)
            assert result.evaluation["absolute"] > 0
            for one, other in zip(own, parameters, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
            assert [step for step, _ in seen] == list(range(1, STEPS + 1))
            assert [metrics["loss"] for _, metrics in seen] == result.losses
    # Bit for bit the same on all ranks.
    for found in every[1:]:
        assert [one[0].losses for one in found] == [other[0].losses for other in every[0]]
        assert [one[0].evaluation for one in found] == [other[0].evaluation for other in every[0]]


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

    def fit(self, snapshots: str | None, **options: Any) -> Any:
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
        directory = None if snapshots is None else os.path.join(self.folder, snapshots)
        data = Numbered(self.seed)
        settings = {"seed": self.seed, "snapshots": directory, "progress": False, **settings}
        trainer = Trainer(model, optimizer, data, self.evaluated_or_not, **settings)
        result = trainer.fit()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return result, self.seen, state

    def evaluated_or_not(self, model: nn.Module, batch: Any) -> Any:
        return self.loss(model, batch) if len(batch) == 3 else squared(model, batch)


def stop_and_resume(seed: int, stops: list[int]) -> list[Any]:
    """Train in one go; then with stops, each time with a new model that loads what was saved."""
    found = []
    for number, wrap in enumerate((lambda model: model, DistributedDataParallel)):
        run = Recorded(seed, os.environ["FOLDER"], wrap)
        whole = run.fit(None)
        losses: list[float] = []
        seen: list[list[int]] = []
        for stop in (*stops, None):
            ends = {} if stop is None else {"steps": stop}
            result, more, state = run.fit(f"snapshots-{number}", snapshot_every=5, **ends)
            losses += result.losses
            seen += more
        again = run.fit(f"snapshots-{number}")  # of a run that has ended
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
    result, seen, _ = Recorded(seed, folder, lambda model: model).fit("snapshots", **options)
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
        run.fit("snapshots", on_step=end_step, snapshot_every=1000)
    assert left.value.code == STOPPED == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(run.losses) == 8  # type: ignore[attr-defined]
    result, *_ = run.fit("snapshots")
    assert run.losses + result.losses == whole.losses  # type: ignore[attr-defined]
    return list(whole.losses)


def test_sigterm_saves_and_leaves(ranks: RankServer) -> None:
    ranks.run(3, asked_to_stop, random.randrange(2**31))


def stopped_with_workers(seed: int) -> None:
    """A launcher's SIGTERM reaches the processes of the loader too; their batches are needed."""
    folder = os.environ["FOLDER"] + "/snapshots"
    losses: list[float] = []

    def end_step(step: int, metrics: dict[str, float]) -> None:
        losses.append(metrics["loss"])
        if step == 2:
            os.killpg(os.getpgrp(), signal.SIGTERM)

    def fit(snapshots: str | None, **options: Any) -> list[float]:
        model = made_model(seed)
        loader = {"num_workers": 1}
        settings: dict[str, Any] = {"global_batch": 12, "epochs": 1, "loader": loader, **options}
        data, optimizer = made_data(seed), adam(model)
        return (
            Trainer(model, optimizer, data, squared, snapshots=snapshots, **settings).fit().losses
        )

    whole = fit(None)
    with pytest.raises(SystemExit) as left:
        fit(folder, on_step=end_step)
    assert left.value.code == STOPPED
    assert losses + fit(folder) == whole


def test_sigterm_to_the_workers_of_the_loader(ranks: RankServer) -> None:
    ranks.run(2, stopped_with_workers, random.randrange(2**31))


# --- what isn't finite --------------------------------------------------------------------------


class Fragile(nn.Module):
    """Its loss stays finite where the gradient of `fragile` isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1).double()
        self.fragile = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: Tensor, broken: bool) -> Tensor:
        factor = self.fragile * (0.0 if broken else 1.0)
        result: Tensor = self.linear(inputs) + factor.abs().sqrt()
        return result


def not_finite(wrapped: bool, precision: str | None) -> list[tuple[str, float]]:
    """Break the gradient, then the loss, of one rank in step 3; the parameters must stay."""
    messages = []
    for what in ("gradient", "loss"):
        model = Fragile()
        whole = DistributedDataParallel(model) if wrapped else model
        steps: list[int] = []

        def loss(
            module: nn.Module, batch: Any, what: str = what, steps: list[int] = steps
        ) -> Tensor:
            broken = len(steps) == 2 and dist.get_rank() == 1
            value: Tensor = module(batch[0], broken and what == "gradient").square().mean()
            return value * float("nan") if broken and what == "loss" else value

        trainer = Trainer(
            whole,
            torch.optim.SGD(whole.parameters(), lr=0.01),
            made_data(0),
            loss,
            global_batch=GLOBAL_BATCH,
            epochs=1,
            precision=precision,
            on_step=lambda step, metrics, steps=steps: steps.append(step),  # type: ignore[misc]
        )
        with pytest.raises(FloatingPointError) as raised:
            trainer.fit()
        assert steps == [1, 2]
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        messages.append((str(raised.value), model.fragile.item()))
    return messages


@pytest.mark.parametrize(("wrapped", "precision"), [(False, None), (True, "bfloat16")])
def test_says_which_rank_and_parameter_is_not_finite(
    ranks: RankServer, wrapped: bool, precision: str | None
) -> None:
    every = ranks.run(2, not_finite, wrapped, precision)
    assert every[0] == every[1]
    (gradient, _), (loss, _) = every[0]
    assert gradient.startswith("step 3 (epoch 1): on rank 1 the gradient of fragile isn't finite.")
    assert loss.startswith("step 3 (epoch 1): on rank 1 the loss is nan, and the gradient of ")
    assert "on rank 0" not in gradient + loss


# --- bad input ----------------------------------------------------------------------------------


def too_small() -> None:
    data = TensorDataset(torch.randn(2, 6).double(), torch.randn(2).double())
    model = made_model(1)
    with pytest.raises(UsageError, match="2 samples given for 3 ranks, expected at least one"):
        Trainer(model, adam(model), data, squared, global_batch=12, epochs=1)
    with pytest.raises(UsageError, match="global batch 2 given for world size 3"):
        Trainer(model, adam(model), made_data(1), squared, global_batch=2, epochs=1)


def test_less_data_than_ranks(ranks: RankServer) -> None:
    ranks.run(3, too_small)


def short_evaluation() -> dict[str, float]:
    data = TensorDataset(*(tensor[:2] for tensor in made_data(4).tensors))
    model = made_model(4)
    trainer = Trainer(
        model, adam(model), made_data(4), squared, global_batch=12, steps=2, evaluate=data
    )
    result = trainer.fit()
    with torch.no_grad():
        expected = squared(model, data.tensors)[0].item()  # type: ignore[arg-type]
    assert result.evaluation["loss"] == pytest.approx(expected, rel=1e-12)
    return result.evaluation


def test_evaluates_on_fewer_samples_than_ranks(ranks: RankServer) -> None:
    every = ranks.run(3, short_evaluation)
    assert all(found == every[0] for found in every)
    assert json.dumps(every[0])


# --- what others see ----------------------------------------------------------------------------


def shown_to_others(seed: int) -> tuple[Any, Any]:
    """Train, and read what this rank's black box says of it; then let rank 1 come late."""
    model = made_model(seed)
    result = Trainer(model, adam(model), made_data(seed), squared, global_batch=12, steps=3).fit()
    job = recording.own_directory()
    assert job is not None
    box = read_box(job, f"{os.getpid()}.box", 100)
    begun = time.monotonic_ns()
    if dist.get_rank() == 1:
        time.sleep(0.3)
    dist.barrier()
    share = waited(begun, time.monotonic_ns())
    assert share is not None
    assert waited(begun, begun) is None
    part = share * (time.monotonic_ns() - begun) / 1e9
    return [tuple(report[1:]) for report in box["reports"]], (part, result.losses)


def test_reports_its_steps_and_how_long_it_waits(ranks: RankServer) -> None:
    every = ranks.run(2, shown_to_others, random.randrange(2**31))
    for reports, (_, losses) in every:
        assert [tuple(report[:2]) for report in reports] == list(enumerate(losses, 1))
    assert every[0][1][0] > 0.2
    assert every[1][1][0] < every[0][1][0]
