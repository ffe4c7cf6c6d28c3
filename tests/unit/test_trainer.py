"""The trainer in one process: invalid input, output and options."""

from __future__ import annotations

import io
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from phalanx.errors import UsageError
from phalanx.train import Trainer, progress
from phalanx.train.preemption import PreemptionHandler
from tests.trainings import DATA, mean_squared, network, trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1, "steps": 1}, "epochs 1 and steps 1 given, expected one of them"),
        ({"epochs": None}, "epochs None and steps None given, expected one of them"),
        ({"epochs": 0}, "epochs is 0, expected at least 1"),
        ({"steps": -3}, "steps is -3, expected at least 1"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0, expected at least 1"),
        ({"accumulate": 3}, "accumulate is 3 with a global batch of 10, expected a number of"),
        ({"accumulate": 0}, "accumulate is 0 with a global batch of 10, expected a number of"),
        ({"global_batch": 0}, "global batch 0 given for world size 1, expected at least one"),
        ({"precision": "half"}, "precision is 'half', expected None"),
        ({"clip": 0.0}, "clip is 0.0, expected a norm above 0, or None"),
        ({"loader": {"batch_size": 4}}, "loader has batch_size, which the trainer sets itself"),
        ({"loader": {"shuffle": True}}, "loader has shuffle, which the trainer sets itself"),
        ({"loader": {"num_workers": 1, "persistent_workers": True}}, "loader has persistent_work"),
        ({"data": iter([1])}, "list_iterator given, expected a data set with a length"),
        ({"data": TensorDataset(torch.zeros(0, 4))}, "0 samples given, expected at least"),
        ({"evaluate": TensorDataset(torch.zeros(0, 4))}, "0 samples given, expected at least 1"),
    ],
)
def test_invalid_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        trainer(**options)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(3, requires_grad=True), "returned a tensor [3], expected a tensor of one"),
        (0.5, "returned float, expected a tensor of one element"),
        ((torch.ones(1), [1]), "returned a tensor [1], expected"),
        ((torch.ones(()), {"right": torch.ones(2)}), "returned metrics that are not numbers"),
        ((torch.ones(()), {"loss": 1.0}), "returned a metric called loss: give it another name"),
    ],
)
def test_invalid_results_of_loss_function(result: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        trainer(loss=lambda model, batch: result).fit()


def test_sharded_parameters_are_rejected() -> None:
    model = nn.Linear(4, 1)
    model.weight.device_mesh = "a mesh"  # type: ignore[assignment] # like a DTensor
    with pytest.raises(UsageError, match=r"Linear has sharded parameters \(DTensor\), expected"):
        trainer(model)


# --- checkpoints of other runs ------------------------------------------------------------------


def other_data() -> Dataset[Any]:
    return TensorDataset(torch.randn(51, 4), torch.randn(51, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: {"model": network(9)},
            "has the state of a different model than Sequential: they differ in 0.weight "
            "(float32[8, 4] saved, "
            "float32[9, 4] here), 0.bias (float32[8] saved, float32[9] here), 2.weight (",
        ),
        (
            lambda: {"model": network(8, nn.Linear(1, 1))},
            "a different model than Sequential: the checkpoint lacks 3.bias, 3.weight. Use another",
        ),
        (
            lambda: {"model": nn.Sequential(nn.Linear(4, 1))},
            "this model lacks 2.bias, 2.weight; they differ in 0.weight (float32[8, 4] saved",
        ),
        (
            lambda: {"model": network().double()},
            "they differ in 0.weight (float32[8, 4] saved, float64[8, 4] here)",
        ),
        (
            lambda: {"optimizer": torch.optim.Adam},
            "has the state of a different optimizer: SGD of 4 parameters (0.weight, 0.bias, 2.we",
        ),
        (lambda: {"data": other_data()}, "does not match this run: GlobalBatchSampler"),
        (lambda: {"seed": 4}, "does not match this run: GlobalBatchSampler"),
    ],
)
def test_checkpoint_of_other_run_is_rejected(
    tmp_path: Path, change: Callable[[], dict[str, Any]], message: str
) -> None:
    trainer(network(), checkpoints=tmp_path, steps=2).fit()
    changed = {"model": network(), **change()}
    before = {name: value.clone() for name, value in changed["model"].state_dict().items()}
    with pytest.raises(UsageError, match=re.escape(message)):
        trainer(**changed, checkpoints=tmp_path, steps=4).fit()
    after = changed["model"].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_checkpoint_without_scheduler_is_rejected(tmp_path: Path) -> None:
    trainer(network(), checkpoints=tmp_path, steps=2).fit()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = Trainer(
        model,
        optimizer,
        DATA,
        mean_squared,
        global_batch=10,
        steps=4,
        scheduler=scheduler,
        checkpoints=tmp_path,
        progress=False,
    )
    with pytest.raises(UsageError, match="has no scheduler state, expected one"):
        run.fit()


def test_unwritable_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((OSError, RuntimeError), match="file"):
        trainer(checkpoints=tmp_path / "file" / "checkpoints")


# --- options ------------------------------------------------------------------------------------


class DictSamples(Dataset[Any]):
    """Samples that are dicts, of a custom data set."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": torch.full((4,), index / 30), "target": torch.tensor([index / 10])}


def test_data_sets_and_loaders() -> None:
    """The losses are the same with and without workers, and with a custom `collate_fn`."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch["inputs"]), batch["target"])

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([s[name] for s in samples]) for name in ("inputs", "target")}

    results = []
    for loader in ({}, {"num_workers": 2}, {"collate_fn": collate}):
        torch.manual_seed(3)
        run = trainer(
            nn.Linear(4, 1), DictSamples(), loss, epochs=2, loader=loader, evaluate=DictSamples()
        )
        results.append(run.fit())
    assert results[0].losses[-1] < results[0].losses[0]
    assert all(other.losses == results[0].losses for other in results)
    assert all(other.evaluation == results[0].evaluation for other in results)


def test_evaluates_in_evaluation_mode_and_restores_modes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9), nn.Linear(8, 1))
    model[0].eval()  # the user has frozen it
    seen = set()

    def loss(whole: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.add((whole.training, model[0].training, torch.is_grad_enabled()))
        return mean_squared(whole, batch)

    result = trainer(model, loss=loss, evaluate=DATA).fit()
    assert seen == {(True, False, True), (False, False, False)}
    assert (model.training, model[0].training, model[1].training) == (True, False, True)
    with torch.no_grad():
        expected = mean_squared(model.eval(), DATA.tensors).item()  # type: ignore[arg-type]
    assert result.evaluation == {"loss": pytest.approx(expected, rel=1e-5)}


def test_nan_passes_without_gradient_check() -> None:
    """Without the check the parameters are lost."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return mean_squared(model, batch) + (model.bias * 0).abs().sqrt().sum()  # type: ignore[operator]

    model = nn.Linear(4, 1)
    trainer(model, loss=loss, steps=1, check_gradients=False).fit()
    assert not model.bias.isfinite().any()
    with pytest.raises(FloatingPointError, match=r"on rank 0 the gradient of bias is not finite"):
        trainer(loss=loss, steps=1).fit()


# --- output -------------------------------------------------------------------------------------


def test_lines_without_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(progress=True, epochs=2, evaluate=DATA).fit()
    out, err = capsys.readouterr()
    number = r"\d+\.\d{4}"
    first, second = err.splitlines()
    expected = rf"epoch 1  step 5/10  loss {number}(  [\d,]+ samples/s  waiting \d+%)?"
    assert re.fullmatch(rf"{expected}  evaluated:  loss {number}", first)
    assert second.startswith("epoch 2  step 10/10  loss ")
    assert out == ""


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return a terminal that gets what the trainer displays."""
    screen = io.StringIO()

    def console(**options: Any) -> Console:
        del options["stderr"]
        return Console(file=screen, force_terminal=True, width=120, highlight=False, **options)

    monkeypatch.setattr(progress, "make_console", console)
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.0)
    return screen


def test_bar_in_terminal(screen: io.StringIO, tmp_path: Path) -> None:
    trainer(progress=True, epochs=2, checkpoints=tmp_path).fit()
    trainer(progress=True, epochs=3, global_batch=25, checkpoints=tmp_path).fit()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r" 10/10 .* loss \d+\.\d{4}  [\d,]+ samples/s  waiting 0%", shown)
    assert re.search(r"resuming from step 10 \(epoch 3, 0 of its 50 samples done\), \S+", shown)
    assert "; global batch 10 before, 25 now" in shown
    assert "training" in shown
    assert " 12/12 " in shown


CURSOR_UP = "\x1b[1A"


@pytest.mark.parametrize("steps", [10, 7])
def test_bar_is_removed_at_the_end(screen: io.StringIO, steps: int) -> None:
    trainer(progress=True, epochs=None, steps=steps).fit()
    assert f"step {steps}/{steps}  loss" in screen.getvalue()
    assert CURSOR_UP in screen.getvalue().rsplit("training", 1)[1]


def test_bar_is_left_after_an_error(screen: io.StringIO) -> None:
    def fail(step: int, _metrics: dict[str, float]) -> None:
        if step == 7:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        trainer(progress=True, epochs=2, on_step=fail).fit()
    *_, bar = screen.getvalue().rsplit("training", 1)
    assert " 7/10" in bar
    assert CURSOR_UP not in bar


def test_completed_run_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trainer(checkpoints=tmp_path).fit()
    result = trainer(progress=True, checkpoints=tmp_path).fit()
    assert (result.step, result.losses) == (5, [])
    assert "the run is complete, nothing is left to train" in capsys.readouterr().err


def test_a_printed_result_is_short() -> None:
    result = trainer(epochs=2, evaluate=DATA).fit()
    number = r"\d+(\.\d+)?(e-\d+)?"
    assert re.fullmatch(
        rf"Result\(step=10, epoch=2, loss={number}, evaluation={{'loss': {number}}}, "
        r"losses=\[10 values\]\)",
        repr(result),
    )
    assert repr(result).split("loss=")[1].startswith(f"{result.losses[-1]:.4g},")


def test_warns_outside_main_thread(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        with PreemptionHandler() as preemption:
            assert not preemption.requested

    with caplog.at_level(logging.WARNING, "phalanx"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "does not run in the main thread, so SIGTERM cannot be handled" in caplog.text


@pytest.mark.parametrize("other", ["class", "order"])
def test_checkpoint_of_similar_optimizer_is_rejected(tmp_path: Path, other: str) -> None:
    def run(optimizer_class: Any, *, swapped: bool) -> Trainer:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        parts = [*model[1].parameters(), *model[0].parameters()] if swapped else model.parameters()
        options: dict[str, Any] = {"global_batch": 10, "steps": 2, "progress": False}
        return Trainer(
            model, optimizer_class(parts), DATA, mean_squared, checkpoints=tmp_path, **options
        )

    run(torch.optim.AdamW, swapped=True).fit()
    optimizer_class = torch.optim.Adam if other == "class" else torch.optim.AdamW
    with pytest.raises(
        UsageError, match="has the state of a different optimizer: AdamW of 4 param"
    ):
        run(optimizer_class, swapped=other == "class").fit()


def test_scheduler_with_counters_resumes(tmp_path: Path) -> None:
    """A checkpoint contains only dicts, but MultiStepLR needs a Counter."""

    def losses(steps: int, folder: Path) -> tuple[list[float], float]:
        torch.manual_seed(3)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lr = torch.optim.lr_scheduler
        parts = [lr.ConstantLR(optimizer, 0.5, 3), lr.MultiStepLR(optimizer, [1, 2], 0.1)]
        scheduler = lr.SequentialLR(optimizer, parts, [3])
        options: dict[str, Any] = {"global_batch": 10, "steps": steps, "progress": False}
        run = Trainer(
            model, optimizer, DATA, mean_squared, scheduler=scheduler, checkpoints=folder, **options
        )
        return run.fit().losses, optimizer.param_groups[0]["lr"]

    whole, last = losses(7, tmp_path / "whole")
    first, _ = losses(2, tmp_path / "parts")
    then, resumed = losses(7, tmp_path / "parts")
    assert first + then == whole
    assert resumed == last
