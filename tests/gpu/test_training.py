"""Training and remote calls with a GPU, against the same in one process on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import rpc
from phalanx.errors import UsageError
from phalanx.parallel import SharedDataParallel, SyncBatchNorm
from phalanx.train import Trainer
from tests.ranks import RankServer
from tests.rpc_training import worker
from tests.seeds import fresh_seed
from tests.trainings import adam, build_model, squared, synthetic_data

SAMPLES, STEPS = 12, 6


def samples(seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the same samples on every device."""
    inputs, targets = (each[:SAMPLES] for each in synthetic_data(seed).tensors)
    return inputs.to(device), targets.to(device)


def normalized(seed: int) -> nn.Module:
    return build_model(seed, nn.BatchNorm1d(17, dtype=torch.float64))


def train(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        squared(model, (inputs, targets))[0].backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_replicas(seed: int, device: str) -> list[Tensor]:
    model = SyncBatchNorm.convert_sync_batchnorm(normalized(seed)).to(device)
    inputs, targets = samples(seed, device)
    own = slice(dist.get_rank(), None, dist.get_world_size())
    return train(DistributedDataParallel(model), inputs[own], targets[own])


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_replicas_equal_one_process(ranks: RankServer, device: str, world_size: int) -> None:
    """DDP and `SyncBatchNorm`; with one rank through NCCL, with several through host memory."""
    seed = fresh_seed()
    expected = train(normalized(seed), *samples(seed, "cpu"))
    for result in ranks.run(world_size, train_replicas, seed, device):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def fit(seed: int, device: str) -> dict[str, Any]:
    model = build_model(seed).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    options: Any = {"global_batch": SAMPLES, "epochs": 2, "seed": seed, "progress": False}
    Trainer(model, adam(model), synthetic_data(seed), squared, **options).fit()
    inner = getattr(model, "module", model)
    return {name: value.cpu() for name, value in inner.state_dict().items()}


def test_the_trainer_equals_one_process(ranks: RankServer, device: str) -> None:
    seed = fresh_seed()
    expected = fit(seed, "cpu")
    for result in ranks.run(2, fit, seed, device):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def share(device: str) -> None:
    model = nn.Linear(3, 4).to(device)
    if device == "cpu":
        SharedDataParallel(model)
    else:
        with pytest.raises(UsageError, match="use PyTorch's DistributedDataParallel"):
            SharedDataParallel(model)


def test_shared_parameters_are_on_the_cpu(ranks: RankServer, device: str) -> None:
    ranks.run(2, share, device)


def product(matrix: Tensor, device: str) -> Tensor:
    """Compute on the device of the worker that is called."""
    there = matrix.to(device)
    return (there @ there.t()).cpu()


def call_device(device: str) -> None:
    with worker() as rank:
        if rank == 0:
            matrix = torch.randn(30, 40, dtype=torch.float64, requires_grad=True)
            result = rpc.rpc_sync("w1", product, (matrix, device))
            torch.testing.assert_close(result, matrix @ matrix.t())
            result.sum().backward()
            own = matrix.detach().requires_grad_()
            (own @ own.t()).sum().backward()
            torch.testing.assert_close(matrix.grad, own.grad)
            if device != "cpu":
                with pytest.raises(UsageError, match=r"send tensor\.cpu\(\)"):
                    rpc.rpc_sync("w1", product, (matrix.detach().to(device), device))
        dist.barrier()


def test_remote_calls_that_compute_on_the_device(ranks: RankServer, device: str) -> None:
    ranks.preload("phalanx.rpc")
    ranks.run(2, call_device, device)
