"""What the black box and the call site cost an all_reduce of 4 bytes, beside a version without.

The two versions take turns, each in processes of its own; a run's figure is the 5th percentile of
600 batches of 200 operations each, which other work on the machine disturbs least, and what is
printed are medians and quartiles of the runs.

    python benchmarks/black_box.py --before OTHER/bin/python [--runs 21] [--ranks 2] [--json FILE]

OTHER is an environment with the version to compare with: for the one before black boxes, check out
commit 7d70691 elsewhere and run `make setup` there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from phalanx.bench.machine import machine, versions

RANK = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("phalanx")
tensor = torch.ones(1)
batches = []
for _ in range(10 + 600):
    begin = time.perf_counter()
    for _ in range(200):
        dist.all_reduce(tensor)
    batches.append((time.perf_counter() - begin) / 200)
if dist.get_rank() == 0:
    print(sorted(batches[10:])[30])
dist.destroy_process_group()
"""


def microseconds(python: str, ranks: int, port: int) -> float:
    environ = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [python, "-c", RANK],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"a rank of {python} failed")
    return 1e6 * float(outputs[0])


def spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", required=True, help="python of the version to compare with")
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", help="also write the figures there")
    options = parser.parse_args()
    before, after = [], []
    for run in range(options.runs):
        print(f"\rrun {run + 1} of {options.runs}", end="", file=sys.stderr, flush=True)
        before.append(microseconds(options.before, options.ranks, 29600 + 2 * run))
        after.append(microseconds(sys.executable, options.ranks, 29601 + 2 * run))
    print(file=sys.stderr)
    result = {
        "machine": machine(),
        "versions": versions(),
        "ranks": options.ranks,
        "runs": options.runs,
        "before_us": spread(before),
        "after_us": spread(after),
        "difference_us": spread([b - a for a, b in zip(before, after, strict=True)]),
    }
    for name in ("before_us", "after_us", "difference_us"):
        low, median, high = result[name]
        print(f"{name:14} {median:6.2f}   ({low:.2f} to {high:.2f})")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
