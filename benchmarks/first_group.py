"""The CPU time to form the first group of a process: `python benchmarks/first_group.py`.

Each measurement starts a new process for each rank. It imports `torch.distributed`, then forms the
group; only the latter is timed. The byte code of the modules is cached, as after an installation.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RANK = """
import sys
import time

import torch.distributed as dist

backend, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
start = time.process_time()
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=size)
print(time.process_time() - start)
dist.destroy_process_group()
"""


def measure(backend: str, size: int, store: Path) -> list[float]:
    command = [sys.executable, "-c", RANK, backend, str(store)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    return [float(rank.communicate(timeout=120)[0]) for rank in ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"phalanx": [], "gloo": []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(-1, options.rounds):  # the first round fills the caches
            for backend, times in seconds.items():
                new_times = measure(
                    backend, options.nproc_per_node, Path(directory, f"{backend}{number}")
                )
                times.extend(new_times if number >= 0 else ())
    for backend, times in seconds.items():
        print(
            f"{backend}: median {statistics.median(times):.4f} s of CPU, "
            f"{min(times):.4f} to {max(times):.4f} s in {len(times)} processes"
        )


if __name__ == "__main__":
    main()
