"""The hybrid step: a table on a server, dense layers on two trainers, driven by a master.

Per step and trainer 128 bags of 5 indices each, `mode="sum"`, a linear layer of 8 classes under
DDP, cross entropy, SGD. Systems:

- `phalanx`: `ShardedEmbeddingBag`, in step (the losses are those of one process), DDP on Phalanx.
- `same_words`: the program of `torch_uv_sparse` on `phalanx.rpc`.
- `torch`: as PyTorch's tutorial has it: `RemoteModule` of an `EmbeddingBag`, distributed autograd
  and optimizer, DDP on Gloo; with TensorPipe's own choice of transports. `torch_uv`: over sockets.
- `torch_uv_sparse`: with `sparse=True`, which PyTorch's tutorial hasn't.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as torch_autograd
from systems import join
from torch import Tensor, nn
from torch.distributed.nn import RemoteModule as TorchRemoteModule
from torch.distributed.optim import DistributedOptimizer as TorchOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from turns import Team, compare, said

from phalanx import embedding
from phalanx import rpc as phalanx_rpc

SIZES = ((100, 16), (100_000, 64), (1_000_000, 64))
SYSTEMS = ("phalanx", "same_words", "torch", "torch_uv", "torch_uv_sparse")
BATCH, PER_BAG, CLASSES, STEPS = 128, 5, 8, 20
TRAINERS, MASTER, SERVER = 2, 2, 3
NAMES = ("trainer-0", "trainer-1", "master", "server")

_trainers: list[Any] = []


def batches(rows: int, rank: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Indices, offsets and classes."""
    random = torch.Generator().manual_seed(rank)
    offsets = torch.arange(0, BATCH * PER_BAG, PER_BAG)
    return [
        (
            torch.randint(rows, (BATCH * PER_BAG,), generator=random),
            offsets,
            torch.randint(CLASSES, (BATCH,), generator=random),
        )
        for _ in range(count)
    ]


class _Trainer:
    """Trains; what differs between systems is `step`."""

    def __init__(self, rows: int, width: int, rank: int) -> None:
        self.batches = batches(rows, rank, STEPS)
        torch.manual_seed(0)
        self.dense = DistributedDataParallel(nn.Linear(width, CLASSES))

    def round(self) -> float:
        dist.barrier()
        begun = time.perf_counter()
        for batch in self.batches:
            self.step(*batch)
        return (time.perf_counter() - begun) / len(self.batches)

    def step(self, indices: Tensor, offsets: Tensor, classes: Tensor) -> None:
        raise NotImplementedError


class _Sharded(_Trainer):
    def __init__(self, rows: int, width: int, rank: int, server: Any) -> None:
        super().__init__(rows, width, rank)
        self.table = embedding.ShardedEmbeddingBag(
            rows, width, [server], mode="sum", trainer=rank, group=dist.group.WORLD
        )
        self.optimizer = torch.optim.SGD(self.dense.parameters(), lr=0.05)

    def step(self, indices: Tensor, offsets: Tensor, classes: Tensor) -> None:
        loss = cross_entropy(self.dense(self.table(indices, offsets)), classes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.table.step()


class _SameWords(_Trainer):
    def __init__(self, rows: int, width: int, rank: int, remote: Any) -> None:
        super().__init__(rows, width, rank)
        self.table = remote
        parameters = [
            *remote.remote_parameters(),
            *map(phalanx_rpc.RRef, self.dense.parameters()),
        ]
        self.optimizer = phalanx_rpc.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)

    def step(self, indices: Tensor, offsets: Tensor, classes: Tensor) -> None:
        loss = cross_entropy(self.dense(self.table(indices, offsets)), classes)
        loss.backward()
        self.optimizer.step()


class _Torch(_Trainer):
    def __init__(self, rows: int, width: int, rank: int, remote: Any) -> None:
        super().__init__(rows, width, rank)
        self.table = remote
        import torch.distributed.rpc as torch_rpc

        parameters = [*remote.remote_parameters(), *map(torch_rpc.RRef, self.dense.parameters())]
        self.optimizer = TorchOptimizer(torch.optim.SGD, parameters, lr=0.05)

    def step(self, indices: Tensor, offsets: Tensor, classes: Tensor) -> None:
        with torch_autograd.context() as context:
            # A module that came as an argument can't be called like one, in PyTorch.
            looked_up = self.table.forward(indices, offsets)
            loss = cross_entropy(self.dense(looked_up), classes)
            torch_autograd.backward(context, [loss])
            self.optimizer.step(context)


def begin(kind: str, rows: int, width: int, rank: int, remote: Any) -> None:
    """On a trainer: get ready."""
    kinds = {"phalanx": _Sharded, "same_words": _SameWords}
    _trainers.append(kinds.get(kind, _Torch)(rows, width, rank, remote))


def train() -> float:
    """On a trainer: a round."""
    return float(_trainers[0].round())


def served(rows: int, width: int) -> embedding.Server:
    """On the server: the table."""
    shards = embedding.RangeShards(rows, 1)
    return embedding.Server.of_shard(shards, 0, width, embedding.SGD(lr=0.05), trainers=TRAINERS)


def work(
    rank: int, folder: str, rounds: Iterable[None], tell: Callable[[float], None], *options: Any
) -> None:
    """One of four workers. The first process is the master."""
    rank = (MASTER, 0, 1, SERVER)[rank]
    system, rows, width = options
    torch.set_num_threads(1)
    ours = system in ("phalanx", "same_words")
    kind = "phalanx" if ours else system.removesuffix("_sparse")
    rpc = join(kind, folder, NAMES[rank], rank, len(NAMES))
    if rank < TRAINERS:
        backend = "phalanx" if ours else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/group", rank=rank, world_size=TRAINERS
        )
    if rank == MASTER:
        drive(rpc, system, rows, width, rounds, tell)
    rpc.shutdown()
    if rank < TRAINERS:
        dist.destroy_process_group()


def drive(
    rpc: Any, system: str, rows: int, width: int, rounds: Iterable[None], tell: Callable[..., None]
) -> None:
    """What the master does."""
    if system == "phalanx":
        remote = rpc.remote("server", served, (rows, width))
    else:
        remote_module = rpc.RemoteModule if system == "same_words" else TorchRemoteModule
        sparse = system == "same_words" or system.endswith("sparse")
        remote = remote_module(
            "server", nn.EmbeddingBag, (rows, width), {"mode": "sum", "sparse": sparse}
        )
    for future in [
        rpc.rpc_async(NAMES[rank], begin, (system, rows, width, rank, remote))
        for rank in range(TRAINERS)
    ]:
        future.wait()
    for _ in rounds:
        futures = [rpc.rpc_async(NAMES[rank], train) for rank in range(TRAINERS)]
        tell(max(future.wait() for future in futures))


def measure(rounds: int, systems: Iterable[str] = SYSTEMS) -> dict[str, Any]:
    """All sizes."""
    found = {}
    for rows, width in SIZES:
        what = f"{rows:,} x {width}"
        teams = [Team(system, work, len(NAMES), (system, rows, width)) for system in systems]
        found[what] = compare(teams, rounds, what)
        print(f"{what:14}  {said(found[what])}")
    return found
