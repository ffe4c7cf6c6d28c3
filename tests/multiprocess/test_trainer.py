"""The trainer on real ranks, compared with a plain loop in one process."""

from __future__ import annotations

import json
import os
import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from phalanx.diagnosis.wait_time import measure_wait_share
from phalanx.errors import UsageError
from phalanx.parallel import SharedDataParallel
from phalanx.recorder import flight_recorder
from phalanx.recorder.recorder_file import read_recorder
from phalanx.train import Trainer
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


# --- the same training as in one process -------------------------------------------------------


def oracle(seed: int, clip: float) -> tuple[list[float], list[Tensor], float]:
    """Return losses, parameters and the loss over all samples of a plain training loop."""
    inputs, targets = synthetic_data(seed).tensors
    model = build_model(seed)
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


def train_all_variants(seed: int) -> list[Any]:
    """Train with plain modules, DDP and SharedDataParallel, in one and in several micro-batches."""
    runs = []
    for wrap in (lambda model: model, DistributedDataParallel, SharedDataParallel):
        for accumulate in (1, 3):
            model = build_model(seed + dist.get_rank())  # rank 0's is used
            whole = wrap(model)
            optimizer = adam(whole)
            steps_seen: list[tuple[int, dict[str, float]]] = []
            result = Trainer(
                whole,
                optimizer,
                synthetic_data(seed),
                squared,
                global_batch=GLOBAL_BATCH,
                epochs=EPOCHS,
                accumulate=accumulate,
                clip=0.5,
                scheduler=halving(optimizer),
                evaluate=synthetic_data(seed),
                seed=seed,
                on_step=lambda step, metrics, steps_seen=steps_seen: steps_seen.append(
                    (step, metrics)
                ),  # type: ignore[misc]
            ).fit()
            parameters = [parameter.detach().clone() for parameter in model.parameters()]
            runs.append((result, parameters, steps_seen))
    return runs


def train_on_gloo(seed: int) -> list[Any]:
    store = dist.FileStore(os.environ["FOLDER"] + "/gloo", 2)
    rank = int(os.environ["RANK"])
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    try:
        return train_all_variants(seed)
    finally:
        dist.destroy_process_group()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", ["1", "2", "4", "2 on gloo"])
def test_equals_plain_loop(ranks: RankServer, setting: str) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    losses, parameters, final = oracle(seed, clip=0.5)
    world_size, gloo = int(setting[0]), "gloo" in setting
    if gloo:
        by_rank = ranks.run(world_size, train_on_gloo, seed, timeout=None)
    else:
        by_rank = ranks.run(world_size, train_all_variants, seed)
    for runs in by_rank:
        assert len(runs) == 6
        for result, own, steps_seen in runs:
            assert (result.step, result.epoch) == (STEPS, EPOCHS)
            assert result.losses == pytest.approx(losses, rel=1e-9)
            assert result.loss == result.losses[-1]
            assert result.evaluation["loss"] == pytest.approx(final, rel=1e-9)
            assert result.evaluation["absolute"] > 0
            for one, other in zip(own, parameters, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
            assert [step for step, _ in steps_seen] == list(range(1, STEPS + 1))
            assert [metrics["loss"] for _, metrics in steps_seen] == result.losses
    # The results are bitwise the same on all ranks.
    for runs in by_rank[1:]:
        assert [one[0].losses for one in runs] == [other[0].losses for other in by_rank[0]]
        assert [one[0].evaluation for one in runs] == [other[0].evaluation for other in by_rank[0]]


# --- values that are not finite -----------------------------------------------------------------


class Fragile(nn.Module):
    """A module whose loss stays finite if the gradient of `fragile` does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1).double()
        self.fragile = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: Tensor, broken: bool) -> Tensor:
        factor = self.fragile * (0.0 if broken else 1.0)
        result: Tensor = self.linear(inputs) + factor.abs().sqrt()
        return result


def train_with_non_finite(wrapped: bool, precision: str | None) -> list[tuple[str, float]]:
    """Break the gradient, then the loss, of one rank in step 3; the parameters must not change."""
    messages = []
    for cause in ("gradient", "loss"):
        model = Fragile()
        whole = DistributedDataParallel(model) if wrapped else model
        steps: list[int] = []

        def loss(
            module: nn.Module, batch: Any, cause: str = cause, steps: list[int] = steps
        ) -> Tensor:
            broken = len(steps) == 2 and dist.get_rank() == 1
            value: Tensor = module(batch[0], broken and cause == "gradient").square().mean()
            return value * float("nan") if broken and cause == "loss" else value

        trainer = Trainer(
            whole,
            torch.optim.SGD(whole.parameters(), lr=0.01),
            synthetic_data(0),
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
def test_names_rank_and_parameter_that_is_not_finite(
    ranks: RankServer, wrapped: bool, precision: str | None
) -> None:
    by_rank = ranks.run(2, train_with_non_finite, wrapped, precision)
    assert by_rank[0] == by_rank[1]
    (gradient, _), (loss, _) = by_rank[0]
    assert gradient.startswith("step 3 (epoch 1): on rank 1 the gradient of fragile is not finite.")
    assert loss.startswith("step 3 (epoch 1): on rank 1 the loss is nan, and the gradient of ")
    assert "on rank 0" not in gradient + loss


# --- invalid input ------------------------------------------------------------------------------


def check_small_data() -> None:
    data = TensorDataset(torch.randn(2, 6).double(), torch.randn(2).double())
    model = build_model(1)
    with pytest.raises(UsageError, match="2 samples given for 3 ranks, expected at least one"):
        Trainer(model, adam(model), data, squared, global_batch=12, epochs=1)
    with pytest.raises(UsageError, match="global batch 2 given for world size 3"):
        Trainer(model, adam(model), synthetic_data(1), squared, global_batch=2, epochs=1)


def test_fewer_samples_than_ranks(ranks: RankServer) -> None:
    ranks.run(3, check_small_data)


def evaluate_on_two_samples() -> dict[str, float]:
    data = TensorDataset(*(tensor[:2] for tensor in synthetic_data(4).tensors))
    model = build_model(4)
    trainer = Trainer(
        model, adam(model), synthetic_data(4), squared, global_batch=12, steps=2, evaluate=data
    )
    result = trainer.fit()
    with torch.no_grad():
        expected = squared(model, data.tensors)[0].item()  # type: ignore[arg-type]
    assert result.evaluation["loss"] == pytest.approx(expected, rel=1e-12)
    return result.evaluation


def test_evaluates_on_fewer_samples_than_ranks(ranks: RankServer) -> None:
    by_rank = ranks.run(3, evaluate_on_two_samples)
    assert all(runs == by_rank[0] for runs in by_rank)
    assert json.dumps(by_rank[0])


# --- reports ------------------------------------------------------------------------------------


def train_and_read_reports(seed: int) -> tuple[Any, Any]:
    """Train, read the reports in this rank's flight recorder, then delay rank 1."""
    model = build_model(seed)
    result = Trainer(
        model, adam(model), synthetic_data(seed), squared, global_batch=12, steps=3
    ).fit()
    job = flight_recorder.get_job_directory()
    assert job is not None
    recording = read_recorder(job, f"{os.getpid()}.recorder", 100)
    start = time.monotonic_ns()
    if dist.get_rank() == 1:
        time.sleep(0.3)
    dist.barrier()
    share = measure_wait_share(start, time.monotonic_ns())
    assert share is not None
    assert measure_wait_share(start, start) is None
    part = share * (time.monotonic_ns() - start) / 1e9
    return [tuple(report[1:]) for report in recording["reports"]], (part, result.losses)


def test_reports_steps_and_wait_time(ranks: RankServer) -> None:
    by_rank = ranks.run(2, train_and_read_reports, random.randrange(2**31))
    for reports, (_, losses) in by_rank:
        assert [tuple(report[:2]) for report in reports] == list(enumerate(losses, 1))
    assert by_rank[0][1][0] > 0.2
    assert by_rank[1][1][0] < by_rank[0][1][0]
