"""The training of the trial `replacements`, on each rank: it continues until a file `stop` exists.

Arguments: the folder, and the number of steps if it is not the file that ends the training. Each
process writes what happens, and when, to a log in the folder.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.train import Elastic
from tests.fault_injection.leaks import measure_resources

# Steps between two checkpoints of rank 0, which others wait for in the next step.
CHECKPOINT_EVERY = 10
MOST_STEPS = 10**9


def main() -> None:
    """Train, and log each step, each change of the ranks, and the parameters at the end."""
    faulthandler.register(signal.SIGUSR1)
    folder = Path(sys.argv[1])
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else MOST_STEPS
    with open(folder / f"{os.getpid()}.log", "a", buffering=1, encoding="utf-8") as file:

        def log(event: str, **fields: Any) -> None:
            file.write(json.dumps({"event": event, "time": time.monotonic(), **fields}) + "\n")

        log("start")
        _train(folder, steps, log)


def _train(folder: Path, steps: int, log: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def wrap(plain: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(plain)
        log("ranks", rank=dist.get_rank(), size=dist.get_world_size())
        return wrapped

    completed = 0
    for step in Elastic(model, optimizer, steps, wrap=wrap, seed=11):
        with step:
            generator = torch.Generator().manual_seed(1000 * step.number + dist.get_rank())
            inputs = torch.randn(16, 20, generator=generator)
            labels = torch.randint(5, (16,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(step.model(inputs), labels).backward()
            stop = torch.tensor([float((folder / "stop").exists())])
            dist.all_reduce(stop)
            optimizer.step()
        if step.error is not None:
            continue
        completed = step.number + 1
        log("step", number=step.number, size=dist.get_world_size())
        if dist.get_rank() == 0 and step.number % CHECKPOINT_EVERY == 0:
            torch.save(model.state_dict(), folder / "checkpoint.new")
            os.replace(folder / "checkpoint.new", folder / "checkpoint")
        if stop.item():
            break
    text = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    digest = hashlib.sha256(text).hexdigest()
    resources = measure_resources()
    log("end", completed=completed, digest=digest, descriptors=resources.descriptors)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
