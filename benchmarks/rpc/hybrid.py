"""The hybrid step: a table on a server, dense layers on two trainers, controlled by a master.

Per step and trainer 128 bags of 5 indices each, `mode="sum"`, a linear layer of 8 classes under
DDP, cross entropy, SGD. Systems:

- `phalanx`: `ShardedEmbeddingBag` with synchronous steps (the losses are those of one process),
  DDP on Phalanx.
- `same_program`: the program of `torch_uv_sparse` on `phalanx.rpc`.
- `torch`: the program of PyTorch's tutorial: `RemoteModule` of an `EmbeddingBag`, distributed
  autograd and optimizer, DDP on Gloo; with TensorPipe's default transports.
- `torch_uv`: the same over sockets.
- `torch_uv_sparse`: `torch_uv` with `sparse=True`, which PyTorch's tutorial does not use.
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
from turns import Team, compare, format_timings

from phalanx import embedding
from phalanx import rpc as phalanx_rpc

SIZES = ((100, 16), (100_000, 64), (1_000_000, 64))
SYSTEMS = ("phalanx", "same_program", "torch", "torch_uv", "torch_uv_sparse")
BATCH, PER_BAG, CLASSES, STEPS = 128, 5, 8, 20
TRAINERS, MASTER, SERVER = 2, 2, 3
NAMES = ("trainer-0", "trainer-1", "master", "server")

_trainers: list[Any] = []


def batches(rows: int, rank: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return batches of indices, offsets and classes."""
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
    """A trainer; systems differ in `step`."""

    def __init__(self, rows: int, width: int, rank: int) -> None:
        self.batches = batches(rows, rank, STEPS)
        torch.manual_seed(0)
        self.dense = DistributedDataParallel(nn.Linear(width, CLASSES))

    def round(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        for batch in self.batches:
            self.step(*batch)
        return (time.perf_counter() - start) / len(self.batches)

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


class _SameProgram(_Trainer):
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
            # PyTorch cannot call a module that was sent as an argument, only its `forward`.
            rows = self.table.forward(indices, offsets)
            loss = cross_entropy(self.dense(rows), classes)
            torch_autograd.backward(context, [loss])
            self.optimizer.step(context)


def prepare(kind: str, rows: int, width: int, rank: int, remote: Any) -> None:
    """Prepare a trainer for the rounds."""
    kinds = {"phalanx": _Sharded, "same_program": _SameProgram}
    _trainers.append(kinds.get(kind, _Torch)(rows, width, rank, remote))


def train() -> float:
    """Run a round on a trainer; return the seconds per step."""
    return float(_trainers[0].round())


def create_server(rows: int, width: int) -> embedding.EmbeddingServer:
    """Create the table's server; called on the server."""
    sharding = embedding.RangeSharding(rows, 1)
    return embedding.EmbeddingServer.create_shard(
        sharding, 0, width, embedding.SGD(lr=0.05), trainers=TRAINERS
    )


def work(
    rank: int, folder: str, rounds: Iterable[None], report: Callable[[float], None], *options: Any
) -> None:
    """Run as one of four workers. The first process is the master."""
    rank = (MASTER, 0, 1, SERVER)[rank]
    system, rows, width = options
    torch.set_num_threads(1)
    is_phalanx = system in ("phalanx", "same_program")
    kind = "phalanx" if is_phalanx else system.removesuffix("_sparse")
    rpc = join(kind, folder, NAMES[rank], rank, len(NAMES))
    if rank < TRAINERS:
        backend = "phalanx" if is_phalanx else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/group", rank=rank, world_size=TRAINERS
        )
    if rank == MASTER:
        drive(rpc, system, rows, width, rounds, report)
    rpc.shutdown()
    if rank < TRAINERS:
        dist.destroy_process_group()


def drive(
    rpc: Any,
    system: str,
    rows: int,
    width: int,
    rounds: Iterable[None],
    report: Callable[..., None],
) -> None:
    """Create the table and run the rounds, on the master."""
    if system == "phalanx":
        remote = rpc.remote("server", create_server, (rows, width))
    else:
        remote_module = rpc.RemoteModule if system == "same_program" else TorchRemoteModule
        sparse = system == "same_program" or system.endswith("sparse")
        remote = remote_module(
            "server", nn.EmbeddingBag, (rows, width), {"mode": "sum", "sparse": sparse}
        )
    for future in [
        rpc.rpc_async(NAMES[rank], prepare, (system, rows, width, rank, remote))
        for rank in range(TRAINERS)
    ]:
        future.wait()
    for _ in rounds:
        futures = [rpc.rpc_async(NAMES[rank], train) for rank in range(TRAINERS)]
        report(max(future.wait() for future in futures))


def measure(rounds: int, systems: Iterable[str] = SYSTEMS) -> dict[str, Any]:
    """Measure all sizes with all systems."""
    results = {}
    for rows, width in SIZES:
        description = f"{rows:,} x {width}"
        teams = [Team(system, work, len(NAMES), (system, rows, width)) for system in systems]
        results[description] = compare(teams, rounds, description)
        print(f"{description:14}  {format_timings(results[description])}")
    return results
