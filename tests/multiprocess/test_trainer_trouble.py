"""What goes wrong on one rank of a training: all of them hear of it, and by which name."""

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
from tests.trainings import GLOBAL_BATCH, STEPS, adam, halving, made_data, made_model, squared

pytestmark = pytest.mark.usefixtures("trainer_loaded")


def trainer(model: nn.Module, loss: Any = squared, **options: Any) -> Trainer:
    options = {"global_batch": GLOBAL_BATCH, "epochs": 2, "progress": False, **options}
    optimizer = options.pop("optimizer", None) or adam(model)
    return Trainer(model, optimizer, made_data(1), loss, **options)


# --- models and metrics that differ -------------------------------------------------------------


class Buffered(nn.Module):
    """With a buffer that doesn't go into a state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size), persistent=False)


def other_models() -> None:
    last = dist.get_world_size() - 1
    here = dist.get_rank() == last
    wider = nn.Sequential(nn.Linear(6, 17 + here), nn.Tanh(), nn.Linear(17 + here, 1)).double()
    named = made_model(1)
    if here:
        named.add_module("2", None)
        named.add_module("head", nn.Linear(17, 1).double())
    frozen = made_model(1)
    frozen[0].bias.requires_grad_(not here)  # type: ignore[index]
    swapped = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("ba" if here else "ab")})
    ends = r"\. Build the same model on all ranks$"
    for model, words in (
        (
            wider,
            rf"^Sequential differs between ranks: 0.weight is parameter float64\[17, 6\] on rank 0 "
            rf"and parameter float64\[18, 6\] on rank {last}; 0.bias is .*; 2.weight is .*{ends}",
        ),
        (named, rf"; 2.bias is .* on rank 0 and missing on rank {last}; head.weight is missing on"),
        (
            frozen,
            rf"0.bias is parameter float64\[17\] on rank 0 and .*, frozen on rank {last}{ends}",
        ),
        (
            nn.Sequential(nn.Linear(6, 1).double(), Buffered(3 + here)),
            rf": 1.mean is buffer float32\[3\] on rank 0 and .* float32\[4\] on rank {last}{ends}",
        ),
        (swapped, f"ModuleDict differs between ranks: names come in another order{ends}"),
    ):
        with all_raise(UsageError, words):
            trainer(model).fit()


def other_metrics() -> None:
    """From the first step on, later, within a step, on all ranks at once, and in an evaluation."""
    last = dist.get_world_size() - 1
    here = dist.get_rank() == last
    made = 0

    def returning(*names: list[str]) -> Any:
        """A loss that returns the metrics of each step, those of the last for ever."""

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
        nonlocal made
        made = step

    ends = r"expected the same names on all ranks, each time: return a metric always or never$"
    others = ", ".join(str(rank) for rank in range(last))
    for loss, options, words, before in (
        (
            returning(["b"] if here else ["a"]),
            {},
            rf"^step 1 \(epoch 1\): .* \(a\) on rank {others}; \(b\) on rank {last}; {ends}",
            0,
        ),
        (
            returning(["a"], ["a"], [] if here else ["a"]),
            {},
            rf"^step 3 \(epoch 1\): .* \(a\) on rank {others}; \(none\) on rank {last}; \(a\) befo",
            2,
        ),
        (
            returning(["a"], ["a"], ["a", "b"] if here else ["a"], ["a"]),
            {"accumulate": 3},
            rf"^step 1 .* \(a\) on rank {others}; \(a\), then \(a, b\) on rank {last}; {ends}",
            0,
        ),
        (returning(["a"], ["b"]), {}, r"^step 2 .* \(b\) on rank 0, 1, .*; \(a\) before; exp", 1),
        (
            # After the two steps of the training, with one batch more on the first ranks.
            returning(["a"], ["a"], ["b"] if here else ["a"]),
            {"steps": 2, "epochs": None, "evaluate": made_data(1)},
            rf"^evaluation: .* \(a\) on rank {others}; \(b\) on rank {last}; {ends}",
            2,
        ),
    ):
        made = 0
        with all_raise(UsageError, words):
            trainer(made_model(1), loss, on_step=count, **options).fit()
        assert made == before


def made_before_the_group() -> None:
    early = trainer(made_model(1))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    method = f"file://{os.environ['FOLDER']}/store"
    dist.init_process_group("phalanx", init_method=method, rank=rank, world_size=size)
    with pytest.raises(
        UsageError, match=rf"made as rank 0 of 1, and this is rank \d of {size}: make it when"
    ):
        early.fit()
    other_models()
    other_metrics()
    dist.destroy_process_group()


def test_what_differs_is_named(ranks: RankServer) -> None:
    ranks.run(3, made_before_the_group, timeout=None)


# --- directories and disks ----------------------------------------------------------------------


def disks(seed: int) -> None:
    """No directory, no room in the middle of a save, a damaged checkpoint: then on as if nothing."""
    rank = dist.get_rank()
    folder = Path(os.environ["FOLDER"])
    (folder / f"file-{rank}").touch()
    here = "file-0" if rank == 0 else f"fine-{rank}"  # only rank 0 writes
    with all_raise(CheckpointError, "^rank 0: .*/file-0/below can't hold checkpoints: Not a dir"):
        trainer(made_model(seed), checkpoints=folder / here / "below")
    with all_raise(UsageError, "/file-0/below can't hold TensorBoard's files: .*a directory that"):
        trainer(made_model(seed), tensorboard=folder / here / "below").fit()

    def fit(**options: Any) -> list[float]:
        model = made_model(seed)
        optimizer = adam(model)
        found = {"optimizer": optimizer, "scheduler": halving(optimizer), **options}
        return trainer(model, **found).fit().losses

    whole = fit()
    checkpoints = folder / "checkpoints"
    losses: list[float] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int, metrics: dict[str, float]) -> None:
        losses.append(metrics["loss"])
        if step == 9 and rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))

    with all_raise(
        CheckpointError, "^rank 0: the checkpoint of step 9 isn't saved: File too large in"
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
    ranks.run(2, disks, seed)


# --- float16 ------------------------------------------------------------------------------------


def left_out() -> list[Any]:
    """One rank's loss is infinite in step 3, and then NaN for ever, from step 6 on."""
    found = []
    for wrap in (lambda model: model, DistributedDataParallel, SharedDataParallel):
        model = made_model(2).float()
        whole = wrap(model)
        optimizer = adam(whole)
        scheduler = halving(optimizer)
        seen: list[list[Tensor]] = []
        losses: list[float] = []

        def loss(module: nn.Module, batch: Any, losses: list[float] = losses) -> Tensor:
            inputs, targets = (tensor.float() for tensor in batch)
            # Small enough for PyTorch's first scale.
            mean = 0.01 * (module(inputs)[:, 0].float() - targets).square().mean()
            if dist.get_rank() == 1 and (len(losses) == 2 or len(losses) >= 5):
                return mean * (math.inf if len(losses) == 2 else math.nan)
            return mean

        def end_step(step: int, metrics: dict[str, float], model: nn.Module = model) -> None:
            losses.append(metrics["loss"])  # noqa: B023 - it is called in this turn alone
            seen.append([it.detach().clone() for it in model.parameters()])  # noqa: B023

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
        moved = [
            any(not torch.equal(*pair) for pair in zip(*both, strict=True))
            for both in itertools.pairwise(seen)
        ]
        assert moved == [True, False, True, True] + [False] * (len(seen) - 5)
        assert scheduler.last_epoch == 4
        found.append((str(raised.value), losses[:2] + losses[3:5]))
    return found


def test_float16_on_ranks(ranks: RankServer) -> None:
    every = ranks.run(2, left_out)
    assert every[0] == every[1]
    for words, losses in every[0]:
        assert words.startswith(
            "step 34 (epoch 3): on rank 1 the loss is nan, and the gradient of "
        )
        assert "The step was not made, as many before it, and scaling the loss by" in words
        assert losses == pytest.approx(every[0][0][1], rel=1e-2)
