"""`torch.distributed.pipelining`: stages, with and without replicas, equal one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.parallel import average_gradients
from tests.ecosystem.oracle import fresh, mesh_of
from tests.ranks import RankServer

PRELOAD = ("torch.distributed.pipelining", "torch.distributed.fsdp")
MICROBATCHES = 4
WIDTH = 6

Replicate = Callable[[nn.Module, dist.DeviceMesh], nn.Module]


def new_layers(seed: int, count: int) -> nn.Sequential:
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count))
    )
    with torch.no_grad():
        for number, parameter in enumerate(layers.parameters()):
            parameter.copy_(fresh(seed + number, *parameter.shape) / 2)
    return layers


def train_alone(layers: nn.Module, seed: int, replicas: int) -> tuple[list[float], list[Tensor]]:
    """Return the losses and parameters of three steps on whole batches."""
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        inputs, targets = rows_of(seed, step, replicas)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(layers(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [parameter.data for parameter in layers.parameters()]


def rows_of(seed: int, step: int, replicas: int) -> tuple[Tensor, Tensor]:
    rows = fresh(seed + 100 + step, 2, 8 * replicas, WIDTH)
    return rows[0], rows[1]


def with_ddp(stage: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(stage, process_group=mesh.get_group())


def without_wrapper(stage: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
    """Return the stage as it is; the test averages the gradients itself."""
    return stage


def with_fsdp(stage: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(stage, mesh=mesh)


def two_stages_two_replicas(kind: str, replicate: Replicate, seed: int) -> None:
    from torch.distributed import pipelining

    mesh = mesh_of(2, 2, names=("replica", "stage"))
    replica, place = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    layers = new_layers(seed, 4)
    expected, parameters = train_alone(copy.deepcopy(layers), seed, 2)
    # Looped: each rank has two stages of one layer each, and the last stage feeds the first rank.
    looped = kind == "ScheduleInterleaved1F1B"
    numbers = (place, place + 2) if looped else (place,)
    per_stage = 1 if looped else 2
    modules = [
        replicate(layers[number * per_stage : (number + 1) * per_stage], mesh["replica"])
        for number in numbers
    ]
    stages = [
        pipelining.PipelineStage(
            module,
            number,
            4 // per_stage,
            torch.device("cpu"),
            group=mesh["stage"].get_group(),
        )
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule = getattr(pipelining, kind)(
        stages if looped else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    own = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.Adam(own, lr=0.01)
    for step in range(3):
        inputs, targets = (rows[replica::2] for rows in rows_of(seed, step, 2))
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
            mean = torch.stack(losses).mean().detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh["replica"].get_group())
            assert float(mean) == pytest.approx(expected[step], rel=1e-9)
        if replicate is without_wrapper:
            average_gradients(nn.ModuleList(modules), group=mesh["replica"].get_group())
        optimizer.step()
    alone = iter(parameters)
    wanted = [[next(alone) for _ in range(2)] for _ in range(4)]
    mine = [
        tensor
        for number in numbers
        for layer in wanted[number * per_stage : (number + 1) * per_stage]
        for tensor in layer
    ]
    for one, other in zip(own, mine, strict=True):
        full = one.full_tensor() if hasattr(one, "full_tensor") else one
        torch.testing.assert_close(full.data, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("kind", "replicate"),
    [
        # DDP's C++ cannot count the backward passes of the other two, on any backend.
        ("Schedule1F1B", with_ddp),
        ("ScheduleGPipe", without_wrapper),
        ("ScheduleInterleaved1F1B", without_wrapper),
        ("ScheduleGPipe", with_fsdp),
    ],
)
def test_two_stages_two_replicas(
    ranks: RankServer, seed: int, kind: str, replicate: Replicate
) -> None:
    ranks.run(4, two_stages_two_replicas, kind, replicate, seed)


def three_stages(seed: int) -> None:
    """Train without replicas; the last stage returns the outputs of all microbatches in order."""
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    alone = new_layers(seed, size)
    inputs, targets = rows_of(seed, 0, 1)
    expected = alone(inputs)
    nn.functional.mse_loss(expected, targets).backward()
    for kind in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        layer = new_layers(seed, size)[rank]
        stage = pipelining.PipelineStage(layer, rank, size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
        given = (inputs,) if rank == 0 else ()
        if rank == size - 1:
            torch.testing.assert_close(schedule.step(*given, target=targets), expected)
        else:
            schedule.step(*given)
        for one, other in zip(layer.parameters(), alone[rank].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_three_stages(ranks: RankServer, seed: int) -> None:
    ranks.run(3, three_stages, seed)
