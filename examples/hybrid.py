"""A parameter server beside data parallelism: will a user click?

    phalanx run --nproc-per-node 4 examples/hybrid.py
    phalanx run --nproc-per-node 7 examples/hybrid.py --servers 2 --trainers 4
    phalanx run --nproc-per-node 4 --max-restarts 3 examples/hybrid.py --checkpoints DIR

A table with a row for each of 20,000 things lives on servers; the dense layers are replicated on
trainers, which average their gradients; a master drives them. A sample is five things; how likely
a click is follows from a hidden number of each. So the least possible loss is known.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx import embedding, rpc

THINGS, PER_SAMPLE, WIDTH, BATCH, STEPS = 20_000, 5, 16, 256, 50


def clicks(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples [count, 5] of things, some met far more often; clicks; how likely each was."""
    hidden = torch.randn(THINGS, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    things = (THINGS ** torch.rand(count, PER_SAMPLE, generator=random)).long() - 1
    likely = torch.sigmoid(hidden[things].sum(1))
    return things, torch.bernoulli(likely, generator=random), likely


class Trainer:
    """The dense layers on one worker, and its view of the table."""

    def __init__(self, number: int, servers: list[rpc.RRef[embedding.Server]]) -> None:
        self.number = number
        self.table = embedding.ShardedEmbeddingBag(THINGS, WIDTH, servers, mode="sum", group=group)
        layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
        self.dense = DistributedDataParallel(layers, process_group=group)
        self.optimizer = torch.optim.Adagrad(self.dense.parameters(), lr=0.05)

    def train(self, epoch: int) -> float:
        """Train with samples that no other trainer and no other epoch has; their mean loss."""
        things, clicked, _ = clicks(STEPS * BATCH, seed=1 + 1_000 * epoch + self.number)
        total = 0.0
        for batch, labels in zip(things.split(BATCH), clicked.split(BATCH), strict=True):
            logits = self.dense(self.table(batch)).squeeze(1)
            loss = binary_cross_entropy_with_logits(logits, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()  # the dense layers, whose gradients DDP has averaged
            self.table.step()  # the rows of this batch, where they live
            total += loss.item()
        return total / STEPS

    def save(self, path: str) -> None:
        """Write the dense layers, which are the same on all trainers, and their optimizer."""
        torch.save([self.dense.state_dict(), self.optimizer.state_dict()], path)

    def load(self, path: str) -> None:
        """Go on from there."""
        dense, optimizer = torch.load(path)
        self.dense.load_state_dict(dense)
        self.optimizer.load_state_dict(optimizer)


def drive(trainers: int, servers: int, epochs: int, folder: Path | None) -> None:
    """On the master: put the table on servers, and have trainers train, epoch by epoch."""
    names = [f"server-{number}" for number in range(servers)]
    rule = embedding.Adagrad(lr=0.2)
    parts = embedding.serve(names, THINGS, WIDTH, rule, trainers=trainers, name="things")
    team = [rpc.remote(f"trainer-{each}", Trainer, (each, parts)) for each in range(trainers)]
    done = sorted(folder.glob("epoch-*")) if folder else []
    if done:
        embedding.load(parts, f"{done[-1]}")
        for trainer in team:
            trainer.rpc_sync().load(f"{done[-1]}/dense.pt")
    likely = clicks(100_000, seed=0)[2]
    least = binary_cross_entropy(likely, likely)
    with Progress() as progress:
        progress.print(f"{trainers} trainers, {servers} servers; the least loss is {least:.4f}")
        bar = progress.add_task("training", total=epochs, completed=len(done))
        for epoch in range(len(done), epochs):
            losses = [trainer.rpc_async(timeout=0).train(epoch) for trainer in team]
            mean = sum(torch.futures.wait_all(losses)) / trainers
            progress.print(f"epoch {epoch:2}: loss {mean:.4f}")
            progress.advance(bar)
            if folder:  # a checkpoint has its name once it is whole
                part = folder / f"part-{epoch}"
                embedding.save(parts, f"{part}")
                team[0].rpc_sync().save(f"{part}/dense.pt")
                part.rename(folder / f"epoch-{epoch:03}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--checkpoints", type=Path, help="keep one after each epoch, go on from them"
    )
    asked = parser.parse_args()
    roles = [f"trainer-{each}" for each in range(asked.trainers)] + ["master"]
    roles += [f"server-{each}" for each in range(asked.servers)]
    torch.manual_seed(0)
    with phalanx.init():
        if len(roles) != dist.get_world_size():
            parser.error(f"roles for {len(roles)} ranks: start with --nproc-per-node {len(roles)}")
        group = dist.new_group(list(range(asked.trainers)))
        rpc.init_rpc(roles[dist.get_rank()])
        if roles[dist.get_rank()] == "master":
            drive(asked.trainers, asked.servers, asked.epochs, asked.checkpoints)
        rpc.shutdown()
