"""FSDP2: `fully_shard` equals training in one process, in each of its forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ecosystem.oracle import (
    adam,
    batch,
    check_trained,
    loss_of,
    mesh_of,
    new_model,
    own,
    train,
    trained_alone,
)
from tests.ranks import RankServer

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
)


def sharded(seed: int) -> None:
    from torch.distributed.fsdp import fully_shard

    for again in (True, False):  # whether parameters are gathered again for backward
        model = new_model(seed)
        for layer in (model[0], model[2], model):
            fully_shard(layer, reshard_after_forward=again)
        train(model, adam(model.parameters()), seed)
        check_trained(model, seed)


def sharded_and_replicated(seed: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = new_model(seed)
    fully_shard(model, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    train(model, adam(model.parameters()), seed)
    check_trained(model, seed)


def sharded_and_tensor_parallel(seed: int) -> None:
    """Shard over two dimensions: rows of the batch, and columns and rows of the layers."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh_of(2, 2, names=("data", "model"))
    model = new_model(seed)
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    place = mesh["data"].get_local_rank()
    train(model, adam(model.parameters()), seed, lambda rows: rows[place::2])
    check_trained(model, seed)


def accumulated(seed: int) -> None:
    """Accumulate gradients of two halves, exchanged after the second; their norm is clipped."""
    from torch.distributed.fsdp import fully_shard

    model, alone = fully_shard(new_model(seed)), new_model(seed)
    rows = own(batch(seed, 0))
    for last, half in enumerate(rows.chunk(2)):
        model.set_requires_gradient_sync(bool(last))
        (loss_of(model(half)) / 2).backward()
    loss_of(alone(batch(seed, 0))).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.01))
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def in_two_precisions(seed: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, alone = new_model(seed).float(), new_model(seed).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    loss_of(model(own(batch(seed, 0)).float()).float()).backward()
    loss_of(alone(batch(seed, 0).float())).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert one.grad.dtype is torch.float32
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=0.05, atol=0.02)


def full_state(seed: int) -> None:
    """Gather the state of model and optimizer on rank 0, and load it into other shards."""
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(new_model(seed))
    optimizer = adam(model.parameters())
    train(model, optimizer, seed)
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = states.get_state_dict(model, optimizer, options=options)
    assert bool(weights) == (dist.get_rank() == 0)
    for full, alone in zip(weights.values(), trained_alone(seed), strict=False):
        torch.testing.assert_close(full, alone, rtol=1e-9, atol=1e-11)
    other = new_model(seed + 1)
    for layer in (other[0], other[2], other):
        fully_shard(layer)
    optimizer = adam(other.parameters())
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # Not set_state_dict: it omits the model on ranks whose part of the state is empty.
    states.set_model_state_dict(other, weights, options=options)
    states.set_optimizer_state_dict(other, optimizer, moments, options=options)
    check_trained(other, seed)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {3.0}


@pytest.mark.parametrize(
    ("check", "world_size"),
    [
        (sharded, 3),
        (sharded_and_replicated, 4),
        (sharded_and_tensor_parallel, 4),
        (accumulated, 2),
        (in_two_precisions, 2),
        (full_state, 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fully_shard(
    ranks: RankServer, seed: int, check: Callable[[int], None], world_size: int
) -> None:
    ranks.run(world_size, check, seed)
