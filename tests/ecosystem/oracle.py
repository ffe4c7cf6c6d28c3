"""A model, its data, and the result of training it in one process.

Everything here depends on a seed only, so all ranks get the same; each test draws a new seed.
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
    """Return a random generator with this seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def new_model(seed: int) -> nn.Sequential:
    """Return a model whose last layer is uneven over ranks.

    (Tensor parallelism in PyTorch requires even layers.)
    """
    model = nn.Sequential(nn.Linear(10, 36), nn.Tanh(), nn.Linear(36, 7)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(fresh(seed + number, *parameter.shape) / 4)
    return model


def batch(seed: int, step: int, world_size: int | None = None) -> Tensor:
    """Return the global batch of a step, of a size that is even for this number of ranks."""
    return fresh(seed + 100 + step, ROWS * (world_size or dist.get_world_size()), 10)


def own(rows: Tensor) -> Tensor:
    """Return this rank's rows of a global batch."""
    return rows[dist.get_rank() :: dist.get_world_size()]


def whole(rows: Tensor) -> Tensor:
    """Return all rows, as in a single process."""
    return rows


def loss_of(outputs: Tensor) -> Tensor:
    """Return a mean over rows, which equals the mean over equal shares of them."""
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
    """Train for some steps; return the losses of this rank's rows."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(share(batch(seed, step, world_size))))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained_alone(seed: int, world_size: int | None = None) -> list[Tensor]:
    """Return the parameters after the same training on whole batches, without communication."""
    model = new_model(seed)
    train(model, adam(model.parameters()), seed, whole, world_size)
    return [parameter.data for parameter in model.parameters()]


def check_trained(model: nn.Module, seed: int, world_size: int | None = None) -> None:
    """Compare the parameters, sharded or not, with those of one process."""
    for parameter, alone in zip(model.parameters(), trained_alone(seed, world_size), strict=True):
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(full.data, alone, rtol=1e-9, atol=1e-11)


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> dist.DeviceMesh:
    """Return a device mesh over all ranks."""
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
