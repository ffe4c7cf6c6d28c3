"""`torch.distributed.checkpoint`: saved state is restored on other ranks and in other shards."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ecosystem.oracle import adam, batch, check_trained, fresh, loss_of, mesh_of, new_model
from tests.ranks import RankServer

PRELOAD = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


def some_state(seed: int) -> dict[str, object]:
    from torch.distributed.tensor import Shard, distribute_tensor

    weights = distribute_tensor(fresh(seed, 10, 6), mesh_of(dist.get_world_size()), [Shard(0)])
    return {"weights": weights, "bias": fresh(seed + 1, 3), "step": 7, "name": "last"}


def save(seed: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = some_state(seed)
    dcp.save(state, checkpoint_id=folder / "saved")
    # Written by a separate thread, in a separate group, while the default group is in use.
    saving = dcp.async_save(state, checkpoint_id=folder / "async", process_group=dist.new_group())
    while not agreed(saving.done()):
        ones = torch.ones(5)
        dist.all_reduce(ones)
        assert ones.tolist() == [float(dist.get_world_size())] * 5
    saving.result(timeout=0)


def agreed(done: bool) -> bool:
    everyone = torch.tensor([done])
    dist.all_reduce(everyone, dist.ReduceOp.MIN)
    return bool(everyone)


def load(seed: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for name in ("saved", "async"):
        for placement in (Shard(1), Shard(0), Replicate()):
            found: dict[str, object] = {
                "weights": distribute_tensor(
                    torch.zeros(10, 6).double(), mesh_of(dist.get_world_size()), [placement]
                ),
                "bias": torch.zeros(3, dtype=torch.float64),
                "step": 0,
                "name": "",
            }
            dcp.load(found, checkpoint_id=folder / name)
            assert torch.equal(found["weights"].full_tensor(), fresh(seed, 10, 6))
            assert isinstance(found["bias"], Tensor)
            assert torch.equal(found["bias"], fresh(seed + 1, 3))
            assert (found["step"], found["name"]) == (7, "last")


def train_from(seed: int, folder: Path, first: int, last: int) -> None:
    """Train the steps from `first` to `last` with `fully_shard`, from and to checkpoints."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(new_model(seed if first == 0 else seed + 1))
    optimizer = adam(model.parameters())
    if first:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(first))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model(batch(seed, step, world_size=6)[rank::size])).backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(last))
    if last == 3:
        check_trained(model, seed, world_size=6)


def test_on_another_number_of_ranks(ranks: RankServer, seed: int, tmp_path: Path) -> None:
    ranks.run(3, save, seed, tmp_path)
    for world_size in (1, 2):
        ranks.run(world_size, load, seed, tmp_path)


def test_training_resumes(ranks: RankServer, seed: int, tmp_path: Path) -> None:
    """Three steps on 2, 3 and 1 ranks, with the optimizer's state, are those of one process."""
    for first, world_size in enumerate((2, 3, 1)):
        ranks.run(world_size, train_from, seed, tmp_path, first, first + 1)
