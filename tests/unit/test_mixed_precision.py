"""The trainer in bfloat16 and float16, against the loops of PyTorch's documentation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.train import Trainer
from tests.trainings import DATA, network, trainer


def plain_amp(model: nn.Module, precision: str) -> list[float]:
    """Train two epochs as in PyTorch's documentation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    losses = []
    for epoch in range(2):
        order = torch.randperm(50, generator=torch.Generator().manual_seed(epoch))
        for part in order.split(10):
            inputs, targets = DATA[part.tolist()]
            with torch.autocast("cpu", getattr(torch, precision)):
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_equals_a_plain_loop(precision: str, tmp_path: Path) -> None:
    """The trainer equals the plain loop; float16 resumes with its scale."""
    dtypes = set()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0])
        dtypes.add(outputs.dtype)
        return nn.functional.mse_loss(outputs.float(), batch[1])

    def run(epochs: int, **options: Any) -> list[float]:
        torch.manual_seed(5)
        options = {"epochs": epochs, "precision": precision, "clip": 1.0, **options}
        return trainer(network(), loss=loss, **options).fit().losses

    torch.manual_seed(5)
    expected = plain_amp(network(), precision)
    losses = run(2)
    assert dtypes == {getattr(torch, precision)}
    assert losses == pytest.approx(expected, rel=1e-6)
    assert run(1, checkpoints=tmp_path) + run(2, checkpoints=tmp_path) == losses


# --- steps that the scaler of float16 skips -----------------------------------------------------

STEPS = 15
# The gradients of the first steps overflow float16 with PyTorch's first scale, 65536.
LARGE = 1000.0


def batches() -> list[tuple[Tensor, Tensor]]:
    parts: list[Tensor] = []
    for epoch in range(3):
        order = torch.randperm(50, generator=torch.Generator().manual_seed(epoch))
        parts += order.split(10)
    return [DATA[part.tolist()] for part in parts]


def lossy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return a loss that is infinite for one batch, as after a float16 overflow."""
    error = nn.functional.mse_loss(model(batch[0]).float(), batch[1]) * LARGE
    return error * (math.inf if torch.equal(batch[1], batches()[8][1]) else 1)


def scheduled(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train_by_hand(model: nn.Module) -> tuple[list[float], int]:
    """Return the losses, and the number of steps."""
    optimizer, scheduler = scheduled(model)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for batch in batches():
        with torch.autocast("cpu", torch.float16):
            loss = lossy(model, batch)
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, scheduler.last_epoch


def test_skipped_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer and the schedule do not advance; training continues, and resumes."""

    def run(steps: int) -> tuple[list[float], int]:
        torch.manual_seed(5)
        model = network()
        optimizer, scheduler = scheduled(model)
        found = Trainer(
            model,
            optimizer,
            DATA,
            lossy,
            global_batch=10,
            steps=steps,
            scheduler=scheduler,
            precision="float16",
            checkpoints=tmp_path,
        ).fit()
        assert found.step == steps
        return found.losses, scheduler.last_epoch

    torch.manual_seed(5)
    expected, made = train_by_hand(network())
    first, _ = run(9)
    second, last = run(STEPS)
    assert first + second == pytest.approx(expected, rel=1e-6)
    assert first[8] == math.inf
    assert last == made < STEPS - 1
    said = capsys.readouterr().err
    assert said.count("left out: its gradients aren't finite in float16; the") == STEPS - made
    assert "step 9 (epoch 2) left out" in said


def test_a_scale_that_does_not_help(tmp_path: Path) -> None:
    """A NaN does not depend on the scale: after about 30 steps, an error names its rank."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0]).float()
        return outputs.square().mean() + (model.bias * 0).abs().sqrt().sum()  # type: ignore[operator]

    model = nn.Linear(4, 1)
    with pytest.raises(FloatingPointError) as raised:
        trainer(model, loss=loss, epochs=20, precision="float16").fit()
    assert str(raised.value).startswith(
        "step 30 (epoch 6): on rank 0 the gradient of bias isn't finite. The step was not made, as "
    )
    assert "scaling the loss by 6e-05 doesn't help" in str(raised.value)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
