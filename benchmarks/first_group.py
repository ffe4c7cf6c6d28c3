"""The CPU time that the first group of a process takes: `python benchmarks/first_group.py`.

Each measurement is a new process per rank. It imports `torch.distributed`, then forms the group;
only the latter is timed. The byte code of the modules is cached, as pip leaves it.
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
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {"phalanx": [], "gloo": []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(-1, given.rounds):  # the first round fills the caches
            for backend, found in seconds.items():
                measured = measure(backend, given.ranks, Path(directory, f"{backend}{number}"))
                found.extend(measured if number >= 0 else ())
    for backend, found in seconds.items():
        print(
            f"{backend}: median {statistics.median(found):.4f} s of CPU, "
            f"{min(found):.4f} to {max(found):.4f} s in {len(found)} processes"
        )


if __name__ == "__main__":
    main()
