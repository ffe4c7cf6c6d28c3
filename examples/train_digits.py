"""Train a small ConvNet on real digits, in step on several ranks: synchronous SGD.

    python examples/train_digits.py                      # two ranks, scikit-learn's digits
    python examples/train_digits.py --nproc 4 --data DIR # MNIST's IDX files in DIR
    phalanx run --nproc-per-node 2 examples/train_digits.py

Every rank holds the same network and takes its share of each global batch; averaging the gradients
gives all of them the same step, so that the networks stay the same.
"""

import argparse
import json
import os
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody does
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx
from phalanx.data import DataPartitioner, GlobalBatchSampler, Partition, load_mnist
from phalanx.parallel import average_gradients, average_gradients_per_parameter

Digits = Dataset[tuple[Tensor, ...]]  # images float32 [1, 28, 28], labels int64 []


class ConvNet(nn.Module):
    """28x28 images to the logarithms of ten probabilities; 21,840 parameters."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.dropout2d = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Take images [n, 1, 28, 28], return log-probabilities [n, 10]."""
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.dropout2d(self.conv2(x)), 2))
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def load_digits(directory: Path | None, seed: int) -> tuple[Digits, Digits]:
    """Return the digits to train on and the held-out ones."""
    if directory is None:
        from sklearn import datasets  # installed by: pip install "phalanx[examples]"

        scans = datasets.load_digits()  # 1797 scans of 8x8, values 0 to 16
        images = torch.from_numpy(scans.images).float()[:, None] / 16
        images = F.interpolate(images, size=(28, 28), mode="bilinear")
        digits = TensorDataset(images, torch.from_numpy(scans.target))
    else:
        parts = {
            name: TensorDataset(images[:, None] / 255, labels)
            for name, (images, labels) in load_mnist(directory).items()
        }
        if len(parts) == 2:
            return parts["train"], parts["t10k"]
        (digits,) = parts.values()
    split = DataPartitioner(digits, [0.8, 0.2], seed)
    return split.use(0), split.use(1)


def evaluate(model: ConvNet, digits: Digits) -> float:
    """Return the accuracy from 0 to 1: every rank counts its share, no sample is counted twice."""
    mine = Partition(digits, range(dist.get_rank(), len(digits), dist.get_world_size()))
    correct = torch.zeros(1, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(mine, batch_size=1000):
            correct += (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(digits)


def train(options: argparse.Namespace) -> None:
    """Run on every rank."""
    with phalanx.init(backend=options.backend) as place:
        train_digits, held_out = load_digits(options.data, options.seed)
        batches = GlobalBatchSampler(train_digits, options.global_batch, seed=options.seed)
        loader = DataLoader(train_digits, sampler=batches, batch_size=None)
        torch.manual_seed(options.seed)  # the same network on every rank
        model = ConvNet(0.0 if options.no_dropout else options.dropout)
        torch.manual_seed(options.seed + 1 + place.rank)  # but dropout of its own
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
        average = average_gradients_per_parameter if options.per_parameter else average_gradients
        losses, began, communicating = [], perf_counter(), 0.0

        epochs = range(options.epochs)
        for epoch in track(epochs, "training", disable=place.rank != 0):
            model.train()
            batches.set_epoch(epoch)
            epoch_loss = 0.0
            for step, (images, labels) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.nll_loss(model(images), labels)
                loss.backward()
                before = perf_counter()
                average(model, weight=batches.weight(step))
                communicating += perf_counter() - before
                optimizer.step()
                epoch_loss += loss.item() / len(batches)
            print(epoch, epoch_loss) if place.rank==0 else None
        total = perf_counter() - began
        accuracy = evaluate(model, held_out)
        if place.rank == 0:
            print(options.seed, f"{accuracy:.2%} {total:.1f}s {communicating/total:.1%}", flush=True)


p = argparse.ArgumentParser()
for n,t,d in [("nproc",int,2),("epochs",int,20),("seed",int,1),("global-batch",int,128),("lr",float,.05),("momentum",float,.9),("dropout",float,.5),("data",Path,None),("backend",str,"gloo")]:
    p.add_argument("--"+n,type=t,default=d)
p.add_argument("--no-dropout",action="store_true"); p.add_argument("--per-parameter",action="store_true")
if __name__ == "__main__":
    o = p.parse_args()
    for s in range(o.seed, o.seed+3):
        o.seed=s
        phalanx.launch(train, o.nproc, (o,))
