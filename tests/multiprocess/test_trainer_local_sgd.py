"""The trainer with LocalSGD and DiLoCo, whose hosts make their own steps."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import UsageError
from phalanx.parallel import DiLoCo, LocalSGD
from phalanx.train import Checkpointer, Trainer
from tests.ranks import RankServer
from tests.trainings import (
    EPOCHS,
    GLOBAL_BATCH,
    SAMPLES,
    STEPS,
    build_model,
    squared,
    synthetic_data,
)

pytestmark = pytest.mark.usefixtures("trainer_loaded")


def oracle(seed: int) -> tuple[list[Tensor], float]:
    """Return the parameters and the loss over all samples of a plain loop with SGD."""
    inputs, targets = synthetic_data(seed).tensors
    model = build_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed + epoch))
        for part in order.split(GLOBAL_BATCH):
            optimizer.zero_grad()
            loss = (model(inputs[part])[:, 0] - targets[part]).square().mean()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        final = (model(inputs)[:, 0] - targets).square().mean().item()
    return [parameter.detach() for parameter in model.parameters()], final


def fit(model: nn.Module, optimizer: Any, seed: int, **options: Any) -> Any:
    return Trainer(
        model,
        optimizer,
        synthetic_data(seed),
        squared,
        **{
            "global_batch": GLOBAL_BATCH,
            "epochs": EPOCHS,
            "evaluate": synthetic_data(seed),
            "seed": seed,
            "progress": False,
            **options,
        },
    ).fit()


def train_with_each_exchange(seed: int) -> Any:
    model = build_model(seed)
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    result = fit(model, optimizer, seed)
    return result.step, result.evaluation["loss"], list(model.parameters())


@pytest.mark.parametrize("hosts", ("ab", "aabb", "abb"))
def test_an_exchange_in_each_step_equals_synchronous_sgd(ranks: RankServer, hosts: str) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    parameters, final = oracle(seed)
    for step, loss, own in ranks.run(len(hosts), train_with_each_exchange, seed, hosts=hosts):
        assert step == STEPS
        assert loss == pytest.approx(final, rel=1e-9)
        for one, other in zip(own, parameters, strict=True):
            torch.testing.assert_close(one.detach(), other, rtol=1e-8, atol=1e-10)


def resume(seed: int) -> list[list[Tensor]]:
    """Train once without an interruption, and once with one after the first epoch."""
    found = []
    for runs in ([EPOCHS], [1, EPOCHS]):
        for epochs in runs:
            model = build_model(seed)
            optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=0.05), 5)
            folder = f"{os.environ['FOLDER']}/{len(runs)}"
            result = fit(model, optimizer, seed, epochs=epochs, checkpoints=folder)
        assert result.step == STEPS
        found.append([each.detach() for each in model.parameters()])
    return found


def test_a_resumed_training(ranks: RankServer) -> None:
    for plain, resumed in (results := ranks.run(3, resume, 5, hosts="abb")):
        for one, other, first in zip(plain, resumed, results[0][0], strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, first)


def rejects() -> None:
    def check(words: str, model: nn.Module | None = None, **options: Any) -> None:
        own = build_model(3)
        given = {key: options.pop(key) for key in ("early", "elastic_optimizer") if key in options}
        if "elastic_optimizer" in given:
            given["elastic"] = given.pop("elastic_optimizer")
        optimizer = LocalSGD(torch.optim.SGD(own.parameters(), lr=0.1), 2, **given)
        with pytest.raises(UsageError, match=words):
            fit(own if model is None else model, optimizer, 3, **options)

    check("LocalSGD with elastic=True given", elastic=True)
    check("LocalSGD with elastic=True given", elastic_optimizer=True)
    check("LocalSGD with early=True given", early=True)
    check("LocalSGD with precision='float16' given", precision="float16")
    sharded = Checkpointer(os.environ["FOLDER"], sharded=True)
    check("LocalSGD with a sharded Checkpointer given", checkpoints=sharded)
    wrapped = DistributedDataParallel(build_model(3))
    check("LocalSGD with a model in DistributedDataParallel given", wrapped)


def test_what_does_not_go_together(ranks: RankServer) -> None:
    ranks.run(2, rejects, hosts="ab")


def meets_nan(seed: int) -> None:
    """The next exchange says which rank has parameters that are not finite."""
    model = build_model(seed)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value, _ = squared(model, batch)
        return value * (float("nan") if dist.get_rank() == 1 else 1.0)

    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), 3)
    trainer = Trainer(
        model, optimizer, synthetic_data(seed), loss, global_batch=12, epochs=1, progress=False
    )
    with pytest.raises(FloatingPointError, match="after step 3, the parameters of rank 1 are not"):
        trainer.fit()


def test_a_host_that_is_not_finite(ranks: RankServer) -> None:
    ranks.run(3, meets_nan, 4, hosts="abc")
