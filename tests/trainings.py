"""Small trainings for the tests of the trainer: data, models, losses and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from phalanx.parallel import SharedDataParallel
from phalanx.train import Trainer

# An epoch has 11 steps of 12 samples, and a last one of 5, in which some ranks have no sample.
SAMPLES, GLOBAL_BATCH, EPOCHS = 137, 12, 2
STEPS = 12 * EPOCHS


def synthetic_data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :3].sin().sum(1) + 0.1 * inputs[:, 3])


def build_model(seed: int, *extra: nn.Module) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), *extra, nn.Linear(17, 1)).double()


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = batch
    errors = model(inputs)[:, 0] - targets
    return errors.square().mean(), {"absolute": errors.abs().mean()}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(model, SharedDataParallel):
        return model.optimizer(torch.optim.AdamW, lr=0.02)
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)


# A training without ranks: a linear model, and a trainer whose options can be overridden.
DATA = TensorDataset(torch.randn(50, 4), torch.randn(50, 1))


def mean_squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trainer(
    model: nn.Module | None = None,
    data: Dataset[Any] = DATA,
    loss: Callable[..., Any] = mean_squared,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> Trainer:
    model = nn.Linear(4, 1) if model is None else model
    if not {"epochs", "steps"} & set(options):
        options["epochs"] = 1
    options = {"global_batch": 10, "progress": False, **options}
    return Trainer(model, optimizer(model.parameters(), lr=0.1), data, loss, **options)


def network(width: int = 8, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1), *more)
