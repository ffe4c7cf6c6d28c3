"""The training step of examples/train_digits.py, with one all-reduce per parameter.

    python benchmarks/train_step.py --nproc-per-node 2 --output benchmarks/train_step_2.json

Global batch 128, the 28x28 ConvNet of 21,840 parameters, SGD with momentum. All backends, and the
step without communication, run alternately in the same processes; a round is 20 steps of each. The
results are medians over the rounds of the slowest rank's mean step, with the quartiles, and the
share of communication on the rank that waits least for the others.
"""

import argparse
import importlib
import json
import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import phalanx
from phalanx.bench.machine import machine, versions
from phalanx.bench.results import Timing
from phalanx.parallel import average_gradients_per_parameter

GLOBAL_BATCH = 128
STEPS = 20
MODES = ("phalanx", "gloo", "alone")


def load_example() -> Any:
    """Return the example's module, whose network is timed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    return importlib.import_module("train_digits")


class Step:
    """One rank's network, batch and clock for communication."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = load_example().ConvNet(0.25)
        # The learning rate is 0, as thousands of steps on one batch would lead to denormal
        # gradients, with which the processor is slower.
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0, 0.9)
        batch = GLOBAL_BATCH // dist.get_world_size()
        self.images = torch.randn(batch, 1, 28, 28)
        self.labels = torch.randint(10, (batch,))

    def run(self, group: dist.ProcessGroup | None) -> tuple[float, float]:
        """Return the mean seconds of a step and of its communication, over STEPS steps."""
        communication = 0.0
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            F.nll_loss(self.model(self.images), self.labels).backward()
            before = time.perf_counter()
            if group is not None:
                average_gradients_per_parameter(self.model, group)
            communication += time.perf_counter() - before
            self.optimizer.step()
        return (time.perf_counter() - start) / STEPS, communication / STEPS


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Time every mode; return the seconds of the slowest rank by mode and round."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    groups = {name: dist.new_group(backend=name) for name in MODES[:2]}
    step = Step()
    seconds: dict[str, dict[str, list[float]]] = {m: {"step": [], "share": []} for m in MODES}
    for number in range(-1, rounds):
        for offset in range(len(MODES)):
            mode = MODES[(number + offset) % len(MODES)]
            taken, communication = step.run(groups.get(mode))
            # The rank that communicates least never waits for a slower one.
            figures = torch.tensor([taken, -communication / taken], dtype=torch.float64)
            dist.all_reduce(figures, dist.ReduceOp.MAX)
            if number >= 0:  # the first round warms up
                seconds[mode]["step"].append(figures[0].item())
                seconds[mode]["share"].append(-figures[1].item())
    dist.destroy_process_group()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    seconds = phalanx.launch(measure, options.nproc_per_node, (options.rounds,))[0]
    steps = {mode: Timing.of(seconds[mode]["step"]) for mode in MODES}
    shares = {mode: Timing.of(seconds[mode]["share"]) for mode in MODES}
    facts = {**machine(), **versions()}
    print(
        f"training step, {options.nproc_per_node} ranks; "
        + ", ".join(f"{k} {facts[k]}" for k in facts)
    )
    for mode, timing in steps.items():
        print(
            f"{mode:>8}  {timing.median * 1e3:7.2f} ms  ({timing.low * 1e3:.2f} - "
            f"{timing.high * 1e3:.2f})  communicating {shares[mode].median:6.1%}"
        )
    print(f"gloo / phalanx: {steps['gloo'].median / steps['phalanx'].median:.2f}")
    if options.output:
        document = {
            "command": shlex.join(["python", *sys.argv]),
            "ranks": options.nproc_per_node,
            "machine": facts,
            "seconds": {mode: vars(timing) for mode, timing in steps.items()},
            "communicating": {mode: vars(share) for mode, share in shares.items()},
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
