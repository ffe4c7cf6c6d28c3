"""A small training for the tests of the trainer: data, a model, a loss, what steps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from phalanx.parallel import DataParallel

# 11 steps of 12 samples in an epoch, and a last one with 5, which leaves some ranks without any.
SAMPLES, GLOBAL_BATCH, EPOCHS = 137, 12, 2
STEPS = 12 * EPOCHS


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
    if isinstance(model, DataParallel):
        return model.optimizer(torch.optim.AdamW, lr=0.02)
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
