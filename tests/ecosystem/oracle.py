"""A model, its data, and what training it in one process makes of it.

All that is here depends on a seed alone: every rank has the same, and the tests draw a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 3
ROWS = 4  # of each rank, in each step

Share = Callable[[Tensor], Tensor]


def fresh(seed: int, *shape: int) -> Tensor:
    """Random numbers of this seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def new_model(seed: int) -> nn.Sequential:
    """A model of which the last layer is uneven over ranks.

    (PyTorch wants layers that are split over ranks, by tensor parallelism, to be even.)
    """
    model = nn.Sequential(nn.Linear(10, 36), nn.Tanh(), nn.Linear(36, 7)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(fresh(seed + number, *parameter.shape) / 4)
    return model


def batch(seed: int, step: int, world_size: int | None = None) -> Tensor:
    """The global batch of a step, as large as is even for this many ranks."""
    return fresh(seed + 100 + step, ROWS * (world_size or dist.get_world_size()), 10)


def own(rows: Tensor) -> Tensor:
    """This rank's rows of a global batch."""
    return rows[dist.get_rank() :: dist.get_world_size()]


def whole(rows: Tensor) -> Tensor:
    """All rows, as one process has them."""
    return rows


def loss_of(outputs: Tensor) -> Tensor:
    """A mean over rows, so that the mean over equal shares of them is the same."""
    return outputs.pow(2).mean()


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    share: Share = own,
    world_size: int | None = None,
) -> list[float]:
    """Train for some steps; returns the losses of this rank's rows."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(share(batch(seed, step, world_size))))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained_alone(seed: int, world_size: int | None = None) -> list[Tensor]:
    """The parameters after the same training on whole batches, without any communication."""
    model = new_model(seed)
    train(model, adam(model.parameters()), seed, whole, world_size)
    return [parameter.data for parameter in model.parameters()]


def check_trained(model: nn.Module, seed: int, world_size: int | None = None) -> None:
    """Compare the parameters, sharded or not, with those of one process."""
    for parameter, alone in zip(model.parameters(), trained_alone(seed, world_size), strict=True):
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(full.data, alone, rtol=1e-9, atol=1e-11)


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> dist.DeviceMesh:
    """A device mesh over all ranks."""
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
