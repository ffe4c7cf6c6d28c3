"""The trainer's TensorBoard files, read by TensorBoard itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.errors import UsageError
from tests.trainings import DATA, mean_squared, trainer


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def approximately(values: list[float]) -> list[tuple[int, Any]]:
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in enumerate(values, 1)]


def test_loss_and_metrics(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:
        return mean_squared(model, batch), {"constant": 3.0}

    result = trainer(loss=loss, evaluate=DATA, tensorboard=tmp_path).fit()
    assert scalars(tmp_path, "train/loss") == approximately(result.losses)
    assert scalars(tmp_path, "train/constant") == approximately([3.0] * 5)
    expected = (5, pytest.approx(result.evaluation["loss"], rel=1e-6))
    assert scalars(tmp_path, "evaluate/loss") == [expected]


@pytest.mark.parametrize("checkpoint_every", [3, 100])
def test_no_step_twice_after_restart(checkpoint_every: int, tmp_path: Path) -> None:
    """Restart a run that fails after its 7th step, from its 6th step or from scratch."""

    def run(name: str, **options: Any) -> list[float]:
        torch.manual_seed(4)
        folders = {"checkpoints": tmp_path / name, "tensorboard": tmp_path / f"{name}-board"}
        options = {"epochs": 2, "checkpoint_every": checkpoint_every, **folders, **options}
        return trainer(nn.Linear(4, 1), evaluate=DATA, **options).fit().losses

    def die(step: int, metrics: dict[str, float]) -> None:
        if step == 7:
            raise InterruptedError

    whole = run("whole")
    with pytest.raises(InterruptedError):
        run("restarted", on_step=die)
    assert len(run("restarted")) == (4 if checkpoint_every == 3 else 10)
    board = tmp_path / "restarted-board"
    assert scalars(board, "train/loss") == approximately(whole)
    assert scalars(board, "evaluate/loss") == scalars(tmp_path / "whole-board", "evaluate/loss")


def test_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UsageError, match=r"cannot write TensorBoard files to .*/file/below: .*rank 0"
    ):
        trainer(tensorboard=tmp_path / "file" / "below").fit()


def test_without_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every rank that needs it raises an error before training."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match="missing: pip install tensorboard,"):
        trainer(tensorboard=tmp_path)
