"""What stands on process groups runs on this one unmodified: PyTorch's own layers, on CPU.

Each is compared with the same computation in one process, or with plain arithmetic.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import RankServer


@pytest.fixture(autouse=True, scope="module")
def preloaded(ranks: RankServer) -> None:
    """Imported once, not by each rank."""
    for module in (
        "torch._dynamo",
        "torch.distributed.tensor.parallel",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
        "torch.distributed.optim",
    ):
        ranks.preload(module)


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> dist.DeviceMesh:
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)


def fresh(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def new_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 7)).double()


def batch(step: int) -> Tensor:
    """The same everywhere: four rows for each rank."""
    return fresh(step, 4 * dist.get_world_size(), 10)


def own(rows: Tensor) -> Tensor:
    return rows[dist.get_rank() :: dist.get_world_size()]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    share: Callable[[Tensor], Tensor] = own,
) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model(share(batch(step))).pow(2).mean().backward()
        optimizer.step()


def trained_alone() -> list[Tensor]:
    model = new_model()
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), lambda rows: rows)
    return [parameter.data for parameter in model.parameters()]


def functional_collectives() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [fresh(peer, 4 * size, 6) for peer in range(size)]
    mine, total = everyone[rank], sum(everyone)
    world = dist.group.WORLD
    kept = mine.clone()
    for group in (world, list(range(size)), mesh_of(size), (mesh_of(size), 0)):
        torch.testing.assert_close(functional.all_reduce(mine, "sum", group), total)
    torch.testing.assert_close(functional.all_reduce(mine, "avg", world), total / size)
    for dim in (0, 1):
        gathered = functional.all_gather_tensor(mine, dim, world)
        assert torch.equal(gathered + 0, torch.cat(everyone, dim))
    part = functional.reduce_scatter_tensor(mine, "sum", 0, world)
    torch.testing.assert_close(part + 0, total[4 * rank : 4 * rank + 4])
    taken = functional.all_to_all_single(mine, None, None, world)
    assert torch.equal(taken + 0, torch.cat([t[4 * rank : 4 * rank + 4] for t in everyone]))
    splits = [4 * size if peer == 0 else 0 for peer in range(size)]  # everything to rank 0
    taken = functional.all_to_all_single(mine, [4 * size if rank == 0 else 0] * size, splits, world)
    assert torch.equal(taken + 0, torch.cat(everyone) if rank == 0 else mine[:0])
    assert torch.equal(functional.broadcast(mine, size - 1, world) + 0, everyone[-1])
    # It takes one dimension only.
    ring = [(peer + 1) % size for peer in range(size)]
    moved = functional.permute_tensor(mine.flatten(), ring, world)
    assert torch.equal(moved + 0, everyone[rank - 1].flatten())
    for result in functional.all_reduce_coalesced([mine, mine], "sum", world):
        torch.testing.assert_close(result + 0, total)
    for result in functional.all_gather_into_tensor_coalesced([mine, mine], world):
        assert torch.equal(result + 0, torch.cat(everyone))
    for result in functional.reduce_scatter_tensor_coalesced([mine], "sum", [0], world):
        torch.testing.assert_close(result + 0, total[4 * rank : 4 * rank + 4])
    assert torch.equal(mine, kept)


def collectives_with_gradients() -> None:
    import torch.distributed.nn.functional as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    value = torch.full((4,), rank + 1.0, requires_grad=True)

    def gradient(result: Tensor) -> list[float]:
        value.grad = None
        result.sum().backward()
        assert value.grad is not None
        return value.grad.tolist()

    assert gradient(functional.all_reduce(value)) == [size] * 4
    assert gradient(torch.stack(functional.all_gather(value))) == [size] * 4
    assert gradient(functional.broadcast(value, 0)) == [size if rank == 0 else 0] * 4
    exchanged = functional.all_to_all_single(torch.zeros(4 * size), torch.cat([value] * size))
    assert gradient(exchanged) == [size] * 4
    assert gradient(functional.reduce_scatter(torch.zeros(4), [value] * size)) == [size] * 4


def redistribution() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh, whole = mesh_of(size), fresh(1, 10, 6)  # 10 rows: uneven over 3 and 4 ranks
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    for placement in (Shard(1), Replicate(), Shard(1), Shard(0), Replicate(), Shard(0)):
        tensor = tensor.redistribute(mesh, [placement])
        assert torch.equal(tensor.full_tensor(), whole)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    for placement in (Shard(0), Shard(1), Replicate()):
        total = partial.redistribute(mesh, [placement]).full_tensor()
        torch.testing.assert_close(total, size * whole)
    other = distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)])
    torch.testing.assert_close((tensor @ other).full_tensor(), whole @ whole.t())


def two_dimensional_mesh() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(2, 2, names=("data", "model"))
    whole = fresh(1, 8, 6)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(tensor.full_tensor(), whole)
    for placements in ([Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(0)]):
        assert torch.equal(tensor.redistribute(mesh, placements).full_tensor(), whole)
    for name in ("data", "model"):
        group = mesh[name].get_group()
        assert group.size() == 2
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [2.0] * 3


def tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.data = fresh(number, *parameter.shape)
    alone, inputs = copy.deepcopy(model), fresh(9, 5, 8)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh_of(dist.get_world_size()), plan)
    torch.testing.assert_close(model(inputs), alone(inputs))


def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    expected = trained_alone()
    model = new_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    for parameter, alone in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.full_tensor().data, alone)


def fully_sharded_in_two_precisions() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = new_model().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    model(fresh(dist.get_rank(), 5, 10).float()).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    assert torch.isfinite(norm)
    squares = [float(parameter.grad.full_tensor().pow(2).sum()) for parameter in model.parameters()]
    assert sum(squares) <= 1.0 + 1e-5


def sharded_and_replicated() -> None:
    from torch.distributed.fsdp import fully_shard

    expected = trained_alone()
    model = new_model()
    fully_shard(model, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    train(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for parameter, alone in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.full_tensor().data, alone)


def sharded_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    expected = trained_alone()
    model = DistributedDataParallel(new_model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
    train(model, optimizer)
    for parameter, alone in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.data, alone)
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(expected)


def checkpoint() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, whole = mesh_of(dist.get_world_size()), fresh(1, 10, 6)
    kept = {"weights": distribute_tensor(whole, mesh, [Shard(0)]), "bias": fresh(2, 3), "step": 7}
    folder = Path(os.environ["FOLDER"])
    dcp.save(kept, checkpoint_id=folder / "saved")
    # Written by the thread of a group of its own, while the world goes on.
    saving = dcp.async_save(kept, checkpoint_id=folder / "async", process_group=dist.new_group())
    ones = torch.ones(5)
    dist.all_reduce(ones)
    saving.result(timeout=30)
    for name in ("saved", "async"):
        found = {
            "weights": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)]),
            "bias": torch.zeros(3, dtype=torch.float64),
            "step": 0,
        }
        dcp.load(found, checkpoint_id=folder / name)
        assert torch.equal(found["weights"].full_tensor(), whole)
        assert torch.equal(found["bias"], kept["bias"])
        assert found["step"] == 7


def pipeline() -> None:
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, targets = fresh(1, 8, 6), fresh(2, 8, 6)
    alone = nn.Sequential(*[nn.Linear(6, 6, bias=False).double() for _ in range(size)])
    for number, layer in enumerate(alone):
        layer.weight.data = fresh(10 + number, 6, 6)
    for kind in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        layers = copy.deepcopy(alone)
        loss = nn.functional.mse_loss(alone(inputs), targets)
        alone.zero_grad()
        loss.backward()
        stage = pipelining.PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        given = (inputs,) if rank == 0 else ()
        losses: list[Tensor] = []
        if rank == size - 1:
            result = schedule.step(*given, target=targets, losses=losses)
            torch.testing.assert_close(result, alone(inputs))
            torch.testing.assert_close(torch.stack(losses).mean(), loss)
        else:
            schedule.step(*given)
        torch.testing.assert_close(layers[rank].weight.grad, alone[rank].weight.grad)


def communication_hooks() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    compressed = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2
    )
    for hook, state, tolerance in (
        (default_hooks.allreduce_hook, None, 1e-12),
        (default_hooks.fp16_compress_hook, None, 1e-2),
        (powerSGD_hook.powerSGD_hook, compressed, float("inf")),
    ):
        model = DistributedDataParallel(new_model())
        model.register_comm_hook(state, hook)
        for step in range(4):
            model.zero_grad()
            alone = new_model()
            model(own(batch(step))).pow(2).mean().backward()
            alone(batch(step)).pow(2).mean().backward()
            for one, other in zip(model.parameters(), alone.parameters(), strict=True):
                assert one.grad is not None
                assert (one.grad - other.grad).abs().max() <= tolerance
        gradients = [torch.zeros_like(one.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(gradients, one.grad)
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def uneven_inputs() -> None:
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(new_model())
    steps = 0
    with Join([model]):
        for step in range(2 + dist.get_rank()):
            model(fresh(step, 4, 10)).sum().backward()
            steps += 1
    assert steps == 2 + dist.get_rank()


def averaged_models() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    parameter = nn.Parameter(torch.full((3,), float(dist.get_rank())))
    parameter.grad = torch.zeros(3)  # what has none is left out
    PeriodicModelAverager(period=1).average_parameters([parameter])
    assert parameter.tolist() == [(dist.get_world_size() - 1) / 2] * 3


LAYERS = (
    (functional_collectives, 3),
    (collectives_with_gradients, 2),
    (redistribution, 3),
    (two_dimensional_mesh, 4),
    (tensor_parallel, 2),
    (fully_sharded, 3),
    (fully_sharded_in_two_precisions, 2),
    (sharded_and_replicated, 4),
    (sharded_optimizer, 2),
    (checkpoint, 2),
    (pipeline, 3),
    (communication_hooks, 2),
    (uneven_inputs, 2),
    (averaged_models, 2),
)


@pytest.mark.parametrize(
    ("layer", "world_size"), LAYERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_layer(ranks: RankServer, layer: Callable[[], None], world_size: int) -> None:
    ranks.run(world_size, layer)
