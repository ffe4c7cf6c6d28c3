"""Train, lose a rank, and go on from the last checkpoint.

phalanx run --nproc-per-node 2 --max-restarts 1 trainer.py runs/digits --kill 35
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset

import phalanx
from phalanx.data import load_digits
from phalanx.parallel import SyncBatchNorm
from phalanx.train import Trainer


def make_model() -> nn.Module:
    """Return a small ConvNet with BatchNorm over the samples of all ranks."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 6 * 6, 10),
    )
    return SyncBatchNorm.convert_sync_batchnorm(model)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of a batch, and the accuracy."""
    images, labels = batch
    outputs = model(images[:, None])
    accuracy = (outputs.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(outputs, labels), {"accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits, with checkpoints.")
    parser.add_argument("checkpoints", help="directory of the checkpoints")
    parser.add_argument("--backend", default="phalanx")
    parser.add_argument("--kill", type=int, default=0, metavar="STEP", help="kill rank 1 there")
    options = parser.parse_args()
    images, labels = load_digits()
    data = TensorDataset(images, labels)
    with phalanx.init(options.backend) as session:
        torch.manual_seed(1)
        model = DistributedDataParallel(make_model())
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            Subset(data, range(1500)),
            loss,
            global_batch=60,
            epochs=4,
            evaluate=Subset(data, range(1500, len(data))),
            checkpoints=options.checkpoints,
            checkpoint_every=10,
            on_step=kill_once(session.rank, options.kill),
        )
        result = trainer.fit()
        if session.is_main:
            print(f"accuracy on held-out digits: {result.evaluation['accuracy']:.0%}")


def kill_once(rank: int, at: int) -> Callable[[int, dict[str, float]], None]:
    """End this process like `kill -9` if it is rank 1, at that step of the first attempt."""
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def on_step(step: int, _: dict[str, float]) -> None:
        if rank == 1 and is_first and step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_step


if __name__ == "__main__":
    try:
        main()
    except phalanx.CheckpointError as error:  # such as a directory that cannot be written
        sys.exit(str(error))
