"""Train a small ConvNet on real digits by synchronous SGD on several ranks.

    python examples/train_digits.py                       # digits of the package, two ranks
    python examples/train_digits.py --nproc-per-node 4 --data DIR  # MNIST's IDX files, four ranks
    phalanx run --nproc-per-node 2 examples/train_digits.py
    mpirun -n 2 python examples/train_digits.py           # or srun

Every rank has the same network. In each step a rank processes its share of the global batch, and
the ranks average their gradients. All ranks make the same step, so their networks stay the same.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from idx import load_mnist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import data, env
from phalanx.data import DataPartitioner, GlobalBatchSampler, Partition
from phalanx.parallel import average_gradients, average_gradients_per_parameter

Digits = TensorDataset | Partition[tuple[Tensor, ...]]  # images [1, 28, 28] and labels


class ConvNet(nn.Module):
    """A classifier of 28x28 images that returns ten log-probabilities; 21,840 parameters."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.dropout2d = nn.Dropout2d(dropout)
        self.linear1 = nn.Linear(320, 50)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Take images [n, 1, 28, 28]; return log-probabilities [n, 10]."""
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.dropout2d(self.conv2(x)), 2))
        x = self.dropout(F.relu(self.linear1(x.flatten(1))))
        return F.log_softmax(self.linear2(x), dim=1)


def load_scans() -> tuple[Tensor, Tensor]:
    """Return the digits of the package, enlarged, with a margin of 4 pixels like MNIST's digits."""
    images, labels = data.load_digits()
    images = F.interpolate(images[:, None], size=(20, 20), mode="bilinear")
    return F.pad(images, (4, 4, 4, 4)), labels


def load_digits(directory: Path | None, seed: int) -> tuple[Digits, Digits]:
    """Return the training digits and the held-out digits."""
    parts = {"scans": load_scans()} if directory is None else load_mnist(directory)
    if directory is not None:
        parts = {name: (images[:, None] / 255, labels) for name, (images, labels) in parts.items()}
    # About mean 0 and variance 1.
    digits = [TensorDataset((images - 0.14) / 0.31, labels) for images, labels in parts.values()]
    if len(digits) == 2:
        return digits[0], digits[1]  # all of MNIST
    split = DataPartitioner(digits[0], [0.8, 0.2], seed)  # the same on every rank
    return split.use(0), split.use(1)


class Worker:
    """One rank's network, its share of the data, and a clock for communication."""

    def __init__(self, options: argparse.Namespace, rank: int, digits: Digits) -> None:
        torch.manual_seed(options.seed)  # the same network on every rank ...
        self.dtype = torch.float64 if options.double else torch.float32
        self.model = ConvNet(0.0 if options.no_dropout else 0.25).to(self.dtype)
        torch.manual_seed(options.seed + 1 + rank)  # ... with a different dropout
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), options.lr, options.momentum, weight_decay=5e-3
        )
        self.batches = GlobalBatchSampler(digits, options.global_batch, seed=options.seed)
        self.loader = DataLoader(digits, sampler=self.batches, batch_size=None)
        self.average = (
            average_gradients_per_parameter if options.per_parameter else average_gradients
        )
        self.communication_seconds = 0.0

    def train_epoch(self, epoch: int) -> Tensor:
        """Return the loss of each step on this rank, float64 [steps]."""
        self.model.train()
        self.batches.set_epoch(epoch)
        losses = []
        for step, (images, labels) in enumerate(self.loader):
            self.optimizer.zero_grad()
            loss = F.nll_loss(self.model(images.to(self.dtype)), labels)
            loss.backward()
            losses.append(loss.item())

            start = perf_counter()
            self.average(self.model, weight=self.batches.weight(step))
            self.communication_seconds += perf_counter() - start
            self.optimizer.step()
        return torch.tensor(losses, dtype=torch.float64)

    def global_losses(self, losses: Tensor) -> Tensor:
        """Return the loss of each step over its global batch."""
        weights = [self.batches.weight(step) for step in range(len(losses))]
        total = losses * torch.tensor(weights, dtype=torch.float64)
        dist.all_reduce(total)
        return total

    def accuracy(self, digits: Digits) -> float:
        """Return the fraction of recognised digits; each digit is evaluated on one rank."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        share = Partition(digits, range(rank, len(digits), world_size))
        correct = torch.zeros(1, dtype=torch.int64)
        self.model.eval()
        with torch.no_grad():
            for images, labels in DataLoader(share, batch_size=1000):
                correct += (self.model(images.to(self.dtype)).argmax(dim=1) == labels).sum()
        dist.all_reduce(correct)
        return correct.item() / len(digits)


def train(options: argparse.Namespace) -> None:
    """Train on one rank; every rank runs this."""
    digits, held_out = load_digits(options.data, options.seed)
    with phalanx.init(options.backend, device="cpu") as session:
        worker = Worker(options, session.rank, digits)
        console = Console(stderr=True, force_terminal=options.terminal, quiet=not session.is_main)
        history = []
        start = perf_counter()
        bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        with bar as progress:
            for epoch in progress.track(range(options.epochs), description="training"):
                losses = worker.train_epoch(epoch)
                history.append(worker.global_losses(losses))
                means = [torch.zeros(1, dtype=torch.float64) for _ in range(session.world_size)]
                dist.all_gather(means, losses.mean().reshape(1))
                text = "  ".join(f"{mean.item():.4f}" for mean in means)
                progress.console.print(f"epoch {epoch + 1:2}  loss of each rank  {text}")
        seconds = perf_counter() - start
        accuracy = worker.accuracy(held_out)
        if session.is_main:
            report(options, worker, seconds, accuracy, torch.cat(history).tolist())


def report(
    options: argparse.Namespace,
    worker: Worker,
    seconds: float,
    accuracy: float,
    losses: list[float],
) -> None:
    """Print the result, and write it to the file given by --losses."""
    print(
        f"{dist.get_world_size()} ranks on {dist.get_backend()}: trained for {seconds:.1f} s, "
        f"{worker.communication_seconds / seconds:.1%} of it communicating"
    )
    print(f"accuracy on held-out digits: {accuracy:.2%}")
    if options.losses:
        options.losses.write_text(json.dumps({"accuracy": accuracy, "losses": losses}))


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected a number of at least 1")
    return int(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nproc-per-node", type=positive, default=2, help="ranks to start (2)")
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    parser.add_argument("--data", type=Path, metavar="DIR", help="MNIST's IDX files, plain or .gz")
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--global-batch", type=positive, default=128, help="samples in a step on all ranks"
    )
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--double", action="store_true", help="compute in float64, for comparison")
    parser.add_argument(
        "--per-parameter",
        action="store_true",
        help="use one all-reduce per parameter, for comparison",
    )
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write each step's loss (JSON)")
    options = parser.parse_args()
    options.terminal = (
        sys.stderr.isatty() or None
    )  # a rank writes to a pipe and does not see the terminal
    return options


def main() -> None:
    options = parse()
    try:
        if "RANK" in os.environ or env.launcher():  # started by phalanx run, torchrun, mpirun, srun
            train(options)
        else:
            phalanx.launch(train, options.nproc_per_node, (options,))
    except phalanx.UsageError as error:
        sys.exit(f"train_digits: {error}")
    except phalanx.LaunchError as error:
        usage = isinstance(error.__cause__, phalanx.UsageError)
        sys.exit(f"train_digits: {error.__cause__ if usage else error}")


if __name__ == "__main__":
    main()
