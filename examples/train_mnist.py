"""Train PyTorch's MNIST example with the Trainer, in one process or on several ranks.

    python examples/train_mnist.py
    phalanx run --nproc-per-node 2 examples/train_mnist.py --data DIR --checkpoints runs/mnist
    phalanx run --nproc-per-node 2 --max-restarts 3 examples/train_mnist.py --checkpoints runs/mnist

If it is killed and started again, it resumes from its last checkpoint. Without --data it trains on
the small digits of the package.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from idx import load_mnist
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset
from train_digits import load_scans

import phalanx
from phalanx.train import Trainer


class Net(nn.Module):
    """The network of PyTorch's own MNIST example; 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Take images [n, 1, 28, 28]; return log-probabilities [n, 10]."""
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Return the mean loss over a batch, and the fraction of recognised digits."""
    images, labels = batch
    outputs = model(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean()
    return F.nll_loss(outputs, labels), {"accuracy": accuracy}


def load(directory: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Return the training digits and the held-out digits: a fifth if there is only one part."""
    if directory is None:
        parts = [load_scans()]
    else:
        parts = [
            (images[:, None] / 255, labels) for images, labels in load_mnist(directory).values()
        ]
    if len(parts) == 1:
        images, labels = parts[0]
        split = len(labels) // 5
        parts = [(images[split:], labels[split:]), (images[:split], labels[:split])]
    train, held_out = (
        TensorDataset((images - 0.1307) / 0.3081, labels) for images, labels in parts
    )
    return train, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="MNIST's IDX files, plain or .gz")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument(
        "--global-batch", type=int, default=64, help="samples in a step on all ranks"
    )
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument(
        "--gamma", type=float, default=0.7, help="factor of the learning rate per epoch"
    )
    parser.add_argument("--precision", choices=["bfloat16", "float16"], help="mixed precision")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="save here, and resume from here"
    )
    parser.add_argument("--backend", default="phalanx")
    options = parser.parse_args()
    try:
        run(options)
    except phalanx.UsageError as error:
        sys.exit(f"train_mnist: {error}")


def run(options: argparse.Namespace) -> None:
    train, held_out = load(options.data)
    with phalanx.init(options.backend) as session:
        torch.manual_seed(options.seed)
        model = Net().to(session.device)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr)
        steps = -(-len(train) // options.global_batch)
        result = Trainer(
            model,
            optimizer,
            train,
            loss,
            global_batch=options.global_batch,
            epochs=options.epochs,
            precision=options.precision,
            scheduler=StepLR(optimizer, step_size=steps, gamma=options.gamma),
            evaluate=held_out,
            checkpoints=options.checkpoints,
            seed=options.seed,
        ).fit()
        if session.is_main:
            print(f"accuracy on held-out digits: {result.evaluation['accuracy']:.2%}")


if __name__ == "__main__":
    main()
