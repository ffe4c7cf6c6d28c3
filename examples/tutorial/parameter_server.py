"""Train a table on a server together with replicated layers on trainers.

phalanx run --nproc-per-node 3 parameter_server.py
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
import phalanx.rpc.autograd as dist_autograd
from phalanx import rpc

THINGS, WIDTH, CLASSES, STEPS = 96, 16, 8, 60


class HybridModel(nn.Module):
    """A table on the server, and a layer that every trainer has a replica of."""

    def __init__(self, table: rpc.RemoteModule, trainers: dist.ProcessGroup) -> None:
        super().__init__()
        self.table = table
        self.dense = DistributedDataParallel(nn.Linear(WIDTH, CLASSES), process_group=trainers)

    def forward(self, things: Tensor) -> Tensor:
        """Take indices [batch, n]; return logits [batch, CLASSES]."""
        logits: Tensor = self.dense(self.table(things))
        return logits


def run_trainer(trainers: dist.ProcessGroup) -> None:
    """Create the model and train it, in both ways."""
    for train in (train_as_in_pytorch, train_plainly):
        torch.manual_seed(0)
        table = rpc.RemoteModule(
            "server", nn.EmbeddingBag, args=(THINGS, WIDTH), kwargs={"mode": "sum"}
        )
        model = HybridModel(table, trainers)
        parameters = [*table.remote_parameters(), *map(rpc.RRef, model.dense.parameters())]
        optimizer = rpc.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
        losses = train(model, optimizer)
        print(f"{train.__name__}: loss {losses[0]:.2f}, then {losses[-1]:.2f}")


def make_batch(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pairs of things of one class, and the class."""
    classes = torch.randint(CLASSES, (32, 1), generator=random)
    things = classes + CLASSES * torch.randint(THINGS // CLASSES, (32, 2), generator=random)
    return things, classes[:, 0]


def train_as_in_pytorch(model: HybridModel, optimizer: rpc.DistributedOptimizer) -> list[float]:
    """Train with a context for each step, as `torch.distributed.rpc` requires."""
    random, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        things, classes = make_batch(random)
        with dist_autograd.context() as context_id:
            loss = F.cross_entropy(model(things), classes)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def train_plainly(model: HybridModel, optimizer: rpc.DistributedOptimizer) -> list[float]:
    """Train as if all parameters were in this process."""
    random, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        things, classes = make_batch(random)
        loss = F.cross_entropy(model(things), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    with phalanx.init(*sys.argv[1:2]) as session:
        if session.world_size == 1:
            sys.exit("start a trainer too: phalanx run --nproc-per-node 3 parameter_server.py")
        server = session.world_size - 1
        trainers = dist.new_group(list(range(server)))
        is_server = session.rank == server
        rpc.init_rpc("server" if is_server else f"trainer-{session.rank}")
        if not is_server:
            run_trainer(trainers)
        rpc.shutdown()
