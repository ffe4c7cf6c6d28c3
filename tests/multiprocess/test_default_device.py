"""The user's default device and dtype change nothing of what the package makes for itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx import rpc
from phalanx.data import DataPartitioner, GlobalBatchSampler, mean_over_ranks
from phalanx.embedding import EmbeddingTable
from phalanx.parallel import SharedDataParallel, SyncBatchNorm
from phalanx.train import Checkpointer
from tests.ranks import RankServer

HOSTS = pytest.mark.parametrize("hosts", ["", "aab"])


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    """Make tensors without memory, and of double precision, where nothing else is said."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def cpu(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def communicates() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    indices = torch.tensor([[0, rank + 1]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (size + 1,))
    with other_defaults():
        dist.barrier()
        total = cpu(rank + 1)
        dist.all_reduce(total)
        assert total.tolist() == [size * (size + 1) / 2]
        dist.all_reduce(total, op=dist.ReduceOp.AVG, group=dist.new_group(), async_op=True).wait()
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [size] + [1] * size
        received = cpu(-1)
        work = dist.isend(cpu(rank), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        work.wait()
        assert received.tolist() == [(rank - 1) % size]
        operation = phalanx.prepare(dist.all_reduce, total)
        operation()
        assert phalanx.shrink().lost_ranks == ()
        dist.barrier()
        assert phalanx.empty_shared(0).device.type == "cpu"
        bucket = phalanx.empty_shared(100, dtype=torch.float32)
        bucket.fill_(rank)
        dist.all_reduce(bucket)
        assert bucket.tolist() == [size * (size - 1) / 2] * 100


@HOSTS
def test_groups(ranks: RankServer, hosts: str) -> None:
    ranks.run(3, communicates, hosts=hosts)


def trains() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    shared = SharedDataParallel(SyncBatchNorm.convert_sync_batchnorm(model))
    inputs = torch.randn(3, 4)
    sampler, data = GlobalBatchSampler(range(50), 10, seed=3), range(20)
    order, parts = list(sampler), [list(DataPartitioner(data).use(part)) for part in range(3)]
    with other_defaults():
        optimizer = shared.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            shared(inputs).square().mean().backward()
            optimizer.step()
        assert mean_over_ranks(float(rank), 1) == (size - 1) / 2
        assert list(GlobalBatchSampler(range(50), 10, seed=3)) == order
        assert [list(DataPartitioner(data).use(part)) for part in range(3)] == parts
        checkpoints = Checkpointer(Path(os.environ["FOLDER"]) / "checkpoints")
        state: dict[str, Any] = {"one": inputs, "none": inputs[:0]}
        checkpoints.save(1, state)
        found = checkpoints.load()
    assert found is not None
    assert all(torch.equal(found.state[name], each) for name, each in state.items())
    sums = [each.detach().sum() for each in model.parameters()]
    for each in sums:
        assert each.dtype == torch.float32
        other = each.clone()
        dist.broadcast(other, 0)
        assert torch.equal(each, other)


@HOSTS
def test_training(ranks: RankServer, hosts: str) -> None:
    ranks.run(2 if not hosts else 3, trains, hosts=hosts)


def nothing() -> Tensor:
    return torch.zeros(0, 3)


def calls() -> None:
    rank = int(os.environ["RANK"])
    options = rpc.RpcBackendOptions(init_method=f"file://{os.environ['FOLDER']}/store")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    with other_defaults():
        result = rpc.rpc_sync(f"w{1 - rank}", nothing)
        assert (result.device.type, result.shape) == ("cpu", (0, 3))
        result = rpc.remote(f"w{1 - rank}", torch.neg, (cpu(1, 2),)).to_here()
        assert result.tolist() == [-1, -2]
    rpc.shutdown()


def test_calls(ranks: RankServer) -> None:
    ranks.run(2, calls, timeout=None)


def test_an_embedding_table() -> None:
    indices = torch.tensor([1, 3, 3])
    with other_defaults():
        table = EmbeddingTable(5, 2, dtype=torch.float32)
        rows = table.gather(indices)
        table.update(indices, torch.ones_like(rows))
        state = table.state_dict()
    assert rows.device.type == "cpu"
    assert all(each.device.type == "cpu" for each in state.values())
