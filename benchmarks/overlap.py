"""The time that an asynchronous all-reduce adds to a concurrent computation.

python benchmarks/overlap.py --nproc-per-node 2

Each rank multiplies matrices, with as many threads as it has cores, while an all-reduce is in
progress, and waits for it at the end. If each rank has a spare core for communication, the
all-reduce should cost almost nothing. Otherwise computation and communication share cores, and take
about the sum of both times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import phalanx

ROUNDS = 21


def time_run(run: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measure(size: int, backend: str) -> dict[str, tuple[float, float, float]]:
    """Run on every rank; return quartiles of the slowest rank's seconds."""
    with phalanx.init(backend):
        buffers = [torch.ones(size // 4) for _ in range(4)]
        a, b = torch.randn(768, 768), torch.randn(768, 768)

        def compute() -> None:
            for _ in range(4):
                torch.mm(a, b)

        def communicate() -> None:
            dist.all_reduce(buffers[0])

        def both() -> None:
            work = dist.all_reduce(buffers[0], async_op=True)
            compute()
            work.wait()

        taken: dict[str, list[float]] = {"compute": [], "communicate": [], "both": []}
        for round_number in range(ROUNDS + 1):
            for name, run in (("compute", compute), ("communicate", communicate), ("both", both)):
                buffers.append(buffers.pop(0).fill_(1.0))
                seconds = time_run(run)
                if round_number > 0:
                    taken[name].append(seconds)
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in taken.items()}
    return {name: (low, median, high) for name, (low, median, high) in quartiles.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure an async all-reduce during a computation."
    )
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks to start (2)")
    parser.add_argument("--mib", type=int, default=16, help="size of the all-reduce in MiB (16)")
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    options = parser.parse_args()
    arguments = (options.mib * 2**20, options.backend)
    results = phalanx.launch(measure, options.nproc_per_node, arguments)[0]
    for name, (low, median, high) in results.items():
        print(f"{name:12} {median * 1e3:7.2f} ms  ({low * 1e3:.2f} to {high * 1e3:.2f})")
    compute, communicate, both = (results[name][1] for name in ("compute", "communicate", "both"))
    print(f"both / compute:                 {both / compute:.2f}")
    print(f"both / (compute + communicate): {both / (compute + communicate):.2f}")


if __name__ == "__main__":
    main()
