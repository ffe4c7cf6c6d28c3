"""PyTorch's DistributedDataParallel, with its options and hooks, equals training in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ecosystem.oracle import (
    adam,
    batch,
    check_trained,
    fresh,
    loss_of,
    new_model,
    own,
    train,
    trained_alone,
)
from tests.ranks import RankServer

PRELOAD = ("torch.distributed.optim", "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")


def check_same_everywhere(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        others = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor)
        assert all(torch.equal(other, tensor) for other in others)


def check_options(options: dict[str, object], seed: int) -> None:
    model = new_model(seed)
    if dist.get_rank() != 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(dist.get_rank())  # DDP broadcasts those of rank 0
    wrapped = DistributedDataParallel(model, **options)
    train(wrapped, adam(wrapped.parameters()), seed)
    check_trained(wrapped, seed)
    check_same_everywhere([parameter.data for parameter in model.parameters()])


# The small bucket makes several all-reduces that overlap with backward.
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, {"bucket_cap_mb": 0.001}),
        (3, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}),
        (4, {"static_graph": True, "bucket_cap_mb": 0.001}),
        (2, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        (2, {"static_graph": True, "gradient_as_bucket_view": True, "broadcast_buffers": False}),
    ],
)
def test_options(ranks: RankServer, seed: int, world_size: int, options: dict[str, object]) -> None:
    ranks.run(world_size, check_options, options, seed)


class Branches(nn.Module):
    """A model that uses one of two branches, by step and rank; BatchNorm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.branches = nn.ModuleList([nn.Linear(10, 2), nn.Linear(10, 2)])

    def forward(self, inputs: Tensor, branch: int) -> Tensor:
        result: Tensor = self.branches[branch](self.norm(inputs))
        return result


def check_unused_and_buffers(seed: int) -> None:
    """Check parameters that some ranks do not use, buffers, and `no_sync`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    alone = Branches().double()
    torch.manual_seed(seed)
    model = DistributedDataParallel(Branches().double(), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        rows = batch(seed, step)
        with model.no_sync():
            model(own(rows), rank % 2).sum().backward()
        model(own(rows), rank % 2).sum().backward()
        # In one process: the rows of each rank separately, since BatchNorm uses batch statistics.
        total = sum(2 * alone(rows[peer::size], peer % 2).sum() / size for peer in range(size))
        gradients = torch.autograd.grad(total, [*alone.parameters()])
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    check_same_everywhere([parameter.grad for parameter in model.parameters()])
    model(own(batch(seed, 4)), 0)  # broadcasts rank 0's buffers, then changes them
    means = [torch.zeros(10).double() for _ in range(size)]
    dist.all_gather(means, model.module.norm.running_mean)
    assert not torch.equal(means[0], means[1])


def check_uneven(seed: int) -> None:
    """Check `join`: ranks without further data shadow the collectives of the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(new_model(seed), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            optimizer.zero_grad()
            loss_of(model(fresh(seed + 10 * rank + step, 4, 10))).backward()
            optimizer.step()
    alone = new_model(seed)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(size):
        optimizer.zero_grad()
        taking = [peer for peer in range(size) if step < 1 + peer]
        for peer in taking:
            (loss_of(alone(fresh(seed + 10 * peer + step, 4, 10))) / len(taking)).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def check_hook(name: str, seed: int) -> None:
    """Check that rounding hooks stay near the exact gradient, and PowerSGD agrees on all ranks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    compressed = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2
    )
    hook, state, tolerance = {
        "allreduce": (default_hooks.allreduce_hook, None, 1e-12),
        "fp16": (default_hooks.fp16_compress_hook, None, 1e-3),
        # PyTorch rejects its own hook by name unless NCCL is available.
        "bf16": (lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket), None, 1e-2),
        "fp16_wrapper": (
            default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
            None,
            1e-3,
        ),
        "powerSGD": (powerSGD_hook.powerSGD_hook, compressed, float("inf")),
    }[name]
    # PowerSGD starts all_reduces in callbacks, whose order relative to another bucket's is
    # undefined unless the backend is NCCL. (On Gloo, this hangs.)
    options = {} if name == "powerSGD" else {"bucket_cap_mb": 0.001}
    model = DistributedDataParallel(new_model(seed), **options)
    model.register_comm_hook(state, hook)
    for step in range(4):
        model.zero_grad()
        alone = new_model(seed)
        loss_of(model(own(batch(seed, step)))).backward()
        loss_of(alone(batch(seed, step))).backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            # Before PowerSGD compresses, it uses plain averages.
            limit = tolerance if step >= 2 else min(tolerance, 1e-2)
            assert (one.grad - other.grad).abs().max() <= limit * (1 + other.grad.abs().max())
    check_same_everywhere([parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("name", ["allreduce", "fp16", "bf16", "fp16_wrapper", "powerSGD"])
def test_hook(ranks: RankServer, seed: int, name: str) -> None:
    ranks.run(2, check_hook, name, seed)


def check_local_sgd(seed: int) -> None:
    """Check local steps with an average of the models every second step."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(new_model(seed))
    alone_group, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=alone_group, start_localSGD_iter=0
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=0)
    )
    copies = [new_model(seed) for _ in range(size)]
    plain = [torch.optim.SGD(copy.parameters(), lr=0.1) for copy in copies]
    for step in range(4):
        rows = batch(seed, step)
        optimizer.zero_grad()
        loss_of(model(own(rows))).backward()
        optimizer.step()
        for peer in range(size):
            plain[peer].zero_grad()
            loss_of(copies[peer](rows[peer::size])).backward()
            plain[peer].step()
        if step % 2 == 0:  # steps are counted from 0
            for parameters in zip(*(copy.parameters() for copy in copies), strict=True):
                mean = torch.stack([parameter.data for parameter in parameters]).mean(0)
                for parameter in parameters:
                    parameter.data.copy_(mean)
        for one, other in zip(model.parameters(), copies[rank].parameters(), strict=True):
            torch.testing.assert_close(one.data, other.data, rtol=1e-9, atol=1e-11)


def check_overlap(seed: int) -> None:
    """Check that an all-reduce ends during backward: the first layer waits for that of the last."""
    reduced = threading.Event()

    def hook(state, bucket):  # DDP rejects string annotations, as in this file
        def end(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            reduced.set()
            return future.value()[0] / dist.get_world_size()

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(end)

    model = DistributedDataParallel(new_model(seed), bucket_cap_mb=0.001)
    model.register_comm_hook(None, hook)
    waited = []
    first = next(model.module.parameters())
    # DDP puts parameters into buckets in the order of backward, but only from the second step on.
    first.register_hook(lambda gradient: waited.append(reduced.wait(15 if waited else 0)))
    for step in range(2):
        reduced.clear()
        loss_of(model(own(batch(seed, step)))).backward()
    assert waited[1:] == [True]


def check_half_precision(seed: int) -> None:
    """Check autocast to bfloat16: averaged float32 gradients are near those of one process."""
    model = DistributedDataParallel(new_model(seed).float())
    alone = new_model(seed).float()
    for network, rows in ((model, own(batch(seed, 0))), (alone, batch(seed, 0))):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(network(rows.float()).float())
        loss.backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=0.02)


def check_sync_batch_norm(seed: int) -> None:
    """Check that PyTorch's SyncBatchNorm rejects CPU tensors before any communication."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(10)).double()
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        model(batch(seed, 0))
    dist.barrier()


@pytest.mark.parametrize(
    ("check", "world_size"),
    [
        (check_unused_and_buffers, 2),
        (check_uneven, 3),
        (check_local_sgd, 2),
        (check_overlap, 2),
        (check_half_precision, 2),
        (check_sync_batch_norm, 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_behaviour(
    ranks: RankServer, seed: int, check: Callable[[int], None], world_size: int
) -> None:
    ranks.run(world_size, check, seed)


def check_sharded_optimizer(bucket_view: bool, seed: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(new_model(seed))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.Adam,
        lr=0.01,
        parameters_as_bucket_view=bucket_view,
    )
    train(model, optimizer, seed)
    check_trained(model, seed)
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(trained_alone(seed))


@pytest.mark.parametrize("bucket_view", [False, True])
def test_zero_redundancy_optimizer(ranks: RankServer, seed: int, bucket_view: bool) -> None:
    ranks.run(3, check_sharded_optimizer, bucket_view, seed)
