"""A parameter server beside data parallelism: will a user click?

    phalanx run --nproc-per-node 4 examples/hybrid.py
    phalanx run --nproc-per-node 7 examples/hybrid.py --servers 2 --trainers 4
    phalanx run --nproc-per-node 4 --max-restarts 3 examples/hybrid.py --checkpoints DIR

A table with a row for each of 20,000 things is split over servers. The dense layers are replicated
on trainers, which average their gradients. A master controls them. A sample consists of five
things; the probability of a click follows from a hidden score of each, so the least possible loss
is known.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx import embedding, rpc

THINGS, PER_SAMPLE, WIDTH, BATCH, STEPS = 20_000, 5, 16, 256, 50


def make_samples(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return samples of things [count, 5], some far more frequent; clicks; their probabilities."""
    scores = torch.randn(THINGS, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    things = (THINGS ** torch.rand(count, PER_SAMPLE, generator=random)).long() - 1
    probabilities = torch.sigmoid(scores[things].sum(1))
    return things, torch.bernoulli(probabilities, generator=random), probabilities


class Trainer:
    """A trainer: the dense layers, and access to the table."""

    def __init__(self, number: int, servers: list[rpc.RRef[embedding.EmbeddingServer]]) -> None:
        self.number = number
        self.table = embedding.ShardedEmbeddingBag(THINGS, WIDTH, servers, mode="sum", group=group)
        layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
        self.dense = DistributedDataParallel(layers, process_group=group)
        self.optimizer = torch.optim.Adagrad(self.dense.parameters(), lr=0.05)

    def train(self, epoch: int) -> float:
        """Train with samples that no other trainer or epoch uses; return their mean loss."""
        things, clicked, _ = make_samples(STEPS * BATCH, seed=1 + 1_000 * epoch + self.number)
        total = 0.0
        for batch, labels in zip(things.split(BATCH), clicked.split(BATCH), strict=True):
            logits = self.dense(self.table(batch)).squeeze(1)
            loss = binary_cross_entropy_with_logits(logits, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()  # the dense layers, whose gradients DDP has averaged
            self.table.step()  # the rows of this batch, on their servers
            total += loss.item()
        return total / STEPS

    def save(self, path: str) -> None:
        """Write the dense layers, which are identical on all trainers, and their optimizer."""
        torch.save([self.dense.state_dict(), self.optimizer.state_dict()], path)

    def load(self, path: str) -> None:
        """Restore the dense layers and their optimizer."""
        dense, optimizer = torch.load(path)
        self.dense.load_state_dict(dense)
        self.optimizer.load_state_dict(optimizer)


def drive(trainers: int, servers: int, epochs: int, folder: Path | None) -> None:
    """Create the table on the servers and run the trainers, epoch by epoch; runs on the master."""
    names = [f"server-{number}" for number in range(servers)]
    optimizer = embedding.Adagrad(lr=0.2)
    table_servers = embedding.deploy(
        names, THINGS, WIDTH, optimizer, trainers=trainers, name="things"
    )
    workers = [
        rpc.remote(f"trainer-{each}", Trainer, (each, table_servers)) for each in range(trainers)
    ]
    saved = sorted(folder.glob("epoch-*")) if folder else []
    if saved:
        embedding.load(table_servers, f"{saved[-1]}")
        for trainer in workers:
            trainer.rpc_sync().load(f"{saved[-1]}/dense.pt")
    probabilities = make_samples(100_000, seed=0)[2]
    least_loss = binary_cross_entropy(probabilities, probabilities)
    console = Console()
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        progress.print(
            f"{trainers} trainers, {servers} servers; the least loss is {least_loss:.4f}"
        )
        task = progress.add_task("training", total=epochs, completed=len(saved))
        for epoch in range(len(saved), epochs):
            losses = [trainer.rpc_async(timeout=0).train(epoch) for trainer in workers]
            mean = sum(torch.futures.wait_all(losses)) / trainers
            progress.print(f"epoch {epoch:2}: loss {mean:.4f}")
            progress.advance(task)
            if folder:  # a checkpoint gets its name when it is complete
                partial = folder / f"part-{epoch}"
                embedding.save(table_servers, f"{partial}")
                workers[0].rpc_sync().save(f"{partial}/dense.pt")
                partial.rename(folder / f"epoch-{epoch:03}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--checkpoints", type=Path, help="save one after each epoch, and resume from the last"
    )
    options = parser.parse_args()
    roles = [f"trainer-{each}" for each in range(options.trainers)] + ["master"]
    roles += [f"server-{each}" for each in range(options.servers)]
    torch.manual_seed(0)
    with phalanx.init():
        if len(roles) != dist.get_world_size():
            parser.error(f"{len(roles)} ranks are needed: start with --nproc-per-node {len(roles)}")
        group = dist.new_group(list(range(options.trainers)))
        rpc.init_rpc(roles[dist.get_rank()])
        if roles[dist.get_rank()] == "master":
            drive(options.trainers, options.servers, options.epochs, options.checkpoints)
        rpc.shutdown()
