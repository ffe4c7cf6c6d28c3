"""Errors on one rank of a training are raised on all ranks, with the name of that rank."""

from __future__ import annotations

import itertools
import math
import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.errors import CheckpointError, UsageError
from phalanx.parallel import SharedDataParallel
from phalanx.train import Trainer
from tests.checkpoint_states import steps
from tests.ranks import RankServer, all_raise
from tests.trainings import GLOBAL_BATCH, STEPS, adam, build_model, halving, squared, synthetic_data

pytestmark = pytest.mark.usefixtures("trainer_loaded")


def trainer(model: nn.Module, loss: Any = squared, **options: Any) -> Trainer:
    options = {"global_batch": GLOBAL_BATCH, "epochs": 2, "progress": False, **options}
    optimizer = options.pop("optimizer", None) or adam(model)
    return Trainer(model, optimizer, synthetic_data(1), loss, **options)


# --- models and metrics that differ -------------------------------------------------------------


class Buffered(nn.Module):
    """A module with a non-persistent buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size), persistent=False)


def check_different_models() -> None:
    last = dist.get_world_size() - 1
    is_last = dist.get_rank() == last
    wider = nn.Sequential(
        nn.Linear(6, 17 + is_last), nn.Tanh(), nn.Linear(17 + is_last, 1)
    ).double()
    named = build_model(1)
    if is_last:
        named.add_module("2", None)
        named.add_module("head", nn.Linear(17, 1).double())
    frozen = build_model(1)
    frozen[0].bias.requires_grad_(not is_last)  # type: ignore[index]
    swapped = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("ba" if is_last else "ab")})
    end = r"\. Build the same model on all ranks$"
    for model, message in (
        (
            wider,
            rf"^Sequential differs between ranks: 0.weight is parameter float64\[17, 6\] on rank 0 "
            rf"and parameter float64\[18, 6\] on rank {last}; 0.bias is .*; 2.weight is .*{end}",
        ),
        (named, rf"; 2.bias is .* on rank 0 and missing on rank {last}; head.weight is missing on"),
        (
            frozen,
            rf"0.bias is parameter float64\[17\] on rank 0 and .*, frozen on rank {last}{end}",
        ),
        (
            nn.Sequential(nn.Linear(6, 1).double(), Buffered(3 + is_last)),
            rf": 1.mean is buffer float32\[3\] on rank 0 and .* float32\[4\] on rank {last}{end}",
        ),
        (swapped, f"ModuleDict differs between ranks: the names are in a different order{end}"),
    ):
        with all_raise(UsageError, message):
            trainer(model).fit()


def check_different_metrics() -> None:
    """Vary the metrics: from the first step, later, in a step, on all ranks, in an evaluation."""
    last = dist.get_world_size() - 1
    is_last = dist.get_rank() == last
    steps_made = 0

    def returning(*names: list[str]) -> Any:
        """Return a loss with the given metrics in each step; the last ones are repeated."""

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
            mean, _ = squared(model, batch)
            return mean, dict.fromkeys(names[min(calls, len(names) - 1)], 1.0)

        calls = -1

        def counted(model: nn.Module, batch: Any) -> Any:
            nonlocal calls
            calls += 1
            return loss(model, batch)

        return counted

    def count(step: int, metrics: dict[str, float]) -> None:
        nonlocal steps_made
        steps_made = step

    end = r"expected the same names on all ranks, each time: return a metric always or never$"
    others = ", ".join(str(rank) for rank in range(last))
    for loss, options, message, before in (
        (
            returning(["b"] if is_last else ["a"]),
            {},
            rf"^step 1 \(epoch 1\): .* \(a\) on rank {others}; \(b\) on rank {last}; {end}",
            0,
        ),
        (
            returning(["a"], ["a"], [] if is_last else ["a"]),
            {},
            rf"^step 3 \(epoch 1\): .* \(a\) on rank {others}; \(none\) on rank {last}; \(a\) befo",
            2,
        ),
        (
            returning(["a"], ["a"], ["a", "b"] if is_last else ["a"], ["a"]),
            {"accumulate": 3},
            rf"^step 1 .* \(a\) on rank {others}; \(a\), then \(a, b\) on rank {last}; {end}",
            0,
        ),
        (returning(["a"], ["b"]), {}, r"^step 2 .* \(b\) on rank 0, 1, .*; \(a\) before; exp", 1),
        (
            # After two training steps, with one more batch on the first ranks.
            returning(["a"], ["a"], ["b"] if is_last else ["a"]),
            {"steps": 2, "epochs": None, "evaluate": synthetic_data(1)},
            rf"^evaluation: .* \(a\) on rank {others}; \(b\) on rank {last}; {end}",
            2,
        ),
    ):
        steps_made = 0
        with all_raise(UsageError, message):
            trainer(build_model(1), loss, on_step=count, **options).fit()
        assert steps_made == before


def check_differences() -> None:
    trainer_without_group = trainer(build_model(1))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    method = f"file://{os.environ['FOLDER']}/store"
    dist.init_process_group("phalanx", init_method=method, rank=rank, world_size=size)
    with pytest.raises(
        UsageError, match=rf"created as rank 0 of 1, but this is rank \d of {size}: create it aft"
    ):
        trainer_without_group.fit()
    check_different_models()
    check_different_metrics()
    dist.destroy_process_group()


def test_differences_are_named(ranks: RankServer) -> None:
    ranks.run(3, check_differences, timeout=None)


# --- directories and disks ----------------------------------------------------------------------


def check_disks(seed: int) -> None:
    """Recover from a bad directory, a full disk during a save, and a damaged checkpoint."""
    rank = dist.get_rank()
    folder = Path(os.environ["FOLDER"])
    (folder / f"file-{rank}").touch()
    is_last = "file-0" if rank == 0 else f"fine-{rank}"  # only rank 0 writes
    with all_raise(
        CheckpointError, "^rank 0: cannot write checkpoints to .*/file-0/below: Not a dir"
    ):
        trainer(build_model(seed), checkpoints=folder / is_last / "below")
    with all_raise(
        UsageError, "cannot write TensorBoard files to .*/file-0/below: .*a directory that"
    ):
        trainer(build_model(seed), tensorboard=folder / is_last / "below").fit()

    def fit(**options: Any) -> list[float]:
        model = build_model(seed)
        optimizer = adam(model)
        results = {"optimizer": optimizer, "scheduler": halving(optimizer), **options}
        return trainer(model, **results).fit().losses

    whole = fit()
    checkpoints = folder / "checkpoints"
    losses: list[float] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int, metrics: dict[str, float]) -> None:
        losses.append(metrics["loss"])
        if step == 9 and rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))

    with all_raise(
        CheckpointError, "^rank 0: the checkpoint of step 9 was not saved: File too large in"
    ):
        fit(checkpoints=checkpoints, checkpoint_every=3, on_step=fill)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps(checkpoints) == [3, 6]
    assert not [name for name in os.listdir(checkpoints) if name.startswith(".saving")]
    assert losses[:6] + fit(checkpoints=checkpoints, checkpoint_every=3) == whole
    assert steps(checkpoints) == [STEPS - 6, STEPS - 3, STEPS]
    if rank == 0:
        (newest,) = checkpoints.glob(f"*-step-{STEPS}")
        file = newest / "state-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    assert fit(checkpoints=checkpoints) == whole[STEPS - 3 :]


def test_directories_and_disks(ranks: RankServer) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    ranks.run(2, check_disks, seed)


# --- float16 ------------------------------------------------------------------------------------


def train_with_infinite_losses() -> list[Any]:
    """Train with a loss that is infinite on one rank in step 3, and NaN from step 6 on."""
    results = []
    for wrap in (lambda model: model, DistributedDataParallel, SharedDataParallel):
        model = build_model(2).float()
        whole = wrap(model)
        optimizer = adam(whole)
        scheduler = halving(optimizer)
        parameters_by_step: list[list[Tensor]] = []
        losses: list[float] = []

        def loss(module: nn.Module, batch: Any, losses: list[float] = losses) -> Tensor:
            inputs, targets = (tensor.float() for tensor in batch)
            # Small enough for PyTorch's initial scale.
            mean = 0.01 * (module(inputs)[:, 0].float() - targets).square().mean()
            if dist.get_rank() == 1 and (len(losses) == 2 or len(losses) >= 5):
                return mean * (math.inf if len(losses) == 2 else math.nan)
            return mean

        def end_step(step: int, metrics: dict[str, float], model: nn.Module = model) -> None:
            losses.append(metrics["loss"])  # noqa: B023 - it is called in this iteration alone
            parameters_by_step.append([it.detach().clone() for it in model.parameters()])  # noqa: B023

        run = trainer(
            whole,
            loss,
            optimizer=optimizer,
            scheduler=scheduler,
            precision="float16",
            on_step=end_step,
            epochs=9,
        )
        with all_raise(FloatingPointError, "") as raised:
            run.fit()
        assert losses[2] == math.inf
        assert not any(math.isfinite(value) for value in losses[5:])
        changed = [
            any(not torch.equal(*pair) for pair in zip(*both, strict=True))
            for both in itertools.pairwise(parameters_by_step)
        ]
        assert changed == [True, False, True, True] + [False] * (len(parameters_by_step) - 5)
        assert scheduler.last_epoch == 4
        results.append((str(raised.value), losses[:2] + losses[3:5]))
    return results


def test_float16_on_ranks(ranks: RankServer) -> None:
    by_rank = ranks.run(2, train_with_infinite_losses)
    assert by_rank[0] == by_rank[1]
    for message, losses in by_rank[0]:
        assert message.startswith(
            "step 34 (epoch 3): on rank 1 the loss is nan, and the gradient of "
        )
        assert "The step was not made, like many before it, and scaling the loss by" in message
        assert losses == pytest.approx(by_rank[0][0][1], rel=1e-2)
