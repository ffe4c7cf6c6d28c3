"""Draw how DDP's all-reduces overlap its backward pass, from the ranks' flight recorders.

python benchmarks/ddp_overlap.py --plot docs/ddp_overlap.png --trace ddp.pftrace

Each rank trains a wide network, whose gradients fill several buckets, and records when forward,
backward and the optimizer's step begin and end. The flight recorder has the operations of the
group's thread, which `phalanx trace` shows too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.diagnosis.job_reader import read_job

WIDTH, LAYERS, ROWS, BUCKET_MIB = 1024, 6, 192, 4
WARM_UP = 5
COLOURS = {
    "forward": "#9ecae1",
    "backward": "#3182bd",
    "wait for all-reduces": "#d9d9d9",
    "optimizer": "#a1d99b",
    "all_reduce": "#e6550d",
}


# Rank, phase, and begin and end in monotonic nanoseconds. It is a tuple because `all_gather_object`
# cannot pickle classes of a script that is started with `phalanx.launch`.
Span = tuple[int, str, int, int]
Step = list[Span]


def train(steps: int, trace: str) -> list[Step]:
    """Run on every rank; return the spans of all ranks in each step, on rank 0."""
    with phalanx.init() as session:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=BUCKET_MIB)
        gradient_times: list[int] = []
        first = next(model.module.parameters())
        first.register_post_accumulate_grad_hook(
            lambda _: gradient_times.append(time.monotonic_ns())
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        recorded: list[Step] = []
        for number in range(WARM_UP + steps):
            dist.barrier()
            phalanx.report(step=number)
            recorded.append(train_step(model, optimizer, session.rank, gradient_times))
        by_rank: list[Any] = [None] * session.world_size
        dist.all_gather_object(by_rank, recorded[WARM_UP:])
        if session.rank == 0:
            if trace:
                job = os.environ["PHALANX_JOB"]
                command = ["phalanx", "trace", job, "--output", trace, "--force"]
                subprocess.run(command, check=True)
            all_steps = [[*itertools.chain(*spans)] for spans in zip(*by_rank, strict=True)]
            add_all_reduces(all_steps)
        else:
            all_steps = []
        dist.barrier()  # a recorder exists as long as its rank
    return all_steps


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, gradient_times: list[int]
) -> Step:
    inputs = torch.randn(ROWS, WIDTH)
    times = [time.monotonic_ns()]
    loss: Tensor = model(inputs).pow(2).mean()
    times.append(time.monotonic_ns())
    loss.backward()
    times += [gradient_times[-1], time.monotonic_ns()]
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.monotonic_ns())
    return [
        (rank, name, times[index], times[index + 1]) for index, name in enumerate([*COLOURS][:4])
    ]


def add_all_reduces(steps: list[Step]) -> None:
    for rank in read_job(os.environ["PHALANX_JOB"]).ranks:
        for operation in rank.history:
            if operation.kind != "all_reduce" or operation.thread != 1:
                continue
            for step in steps:
                own = [span for span in step if span[0] == rank.rank]
                if own[0][2] <= operation.begin <= own[3][3]:
                    step.append((rank.rank, "all_reduce", operation.begin, operation.end))


def overlap_share(step: Step) -> float:
    """Return the fraction of the all-reduces' time in which the rank still computed gradients."""
    overlapped = total = 0
    computing = {rank: (begin, end) for rank, name, begin, end in step if name == "backward"}
    for rank, name, begin, end in step:
        if name == "all_reduce":
            first, last = computing[rank]
            total += end - begin
            overlapped += max(0, min(end, last) - max(begin, first))
    return overlapped / total


def plot(step: Step, path: Path) -> None:
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    start = min(begin for _, _, begin, _ in step)
    ranks = sorted({rank for rank, _, _, _ in step})
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.9 * len(ranks)))
    for rank, name, begin, end in step:
        row = 2 * rank + (name == "all_reduce")
        bar = [((begin - start) / 1e6, (end - begin) / 1e6)]
        axes.broken_barh(bar, (row - 0.4, 0.8), color=COLOURS[name], edgecolor="white")
    labels = [f"rank {rank}, {thread}" for rank in ranks for thread in ("script", "group's thread")]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="upper center", ncol=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw the overlap of DDP's all-reduces and its backward pass."
    )
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks to start (2)")
    parser.add_argument("--steps", type=int, default=30, help="steps to record (30)")
    parser.add_argument("--plot", type=Path, help="write a picture of the median step to this file")
    parser.add_argument("--trace", default="", help="write a timeline for Perfetto to this file")
    options = parser.parse_args()
    steps = phalanx.launch(train, options.nproc_per_node, (options.steps, options.trace))[0]
    shares = sorted(overlap_share(step) for step in steps)
    low, _, high = statistics.quantiles(shares, n=4)
    median_step = sorted(steps, key=overlap_share)[len(steps) // 2]
    print(
        f"all-reduces during backward: {statistics.median(shares):.0%} of their time (quartiles "
        f"{low:.0%} and {high:.0%}), {len(steps)} steps of {options.nproc_per_node} ranks"
    )
    if options.plot:
        plot(median_step, options.plot)


if __name__ == "__main__":
    main()
