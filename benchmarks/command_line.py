"""The time until the command line answers: `python benchmarks/command_line.py`.

Each measurement is a new process, from its start to its end. The commands take turns. torchrun gets
the same wrong argument as `phalanx run`. A job of two ranks that has failed is explained, and one
that does not exist.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from phalanx.bench.machine import machine, versions

FAILING = """
import sys

import phalanx
import torch
import torch.distributed as dist

with phalanx.init() as session:
    dist.all_reduce(torch.ones(1))
    sys.exit(3 * session.rank)
"""
PHALANX = [sys.executable, "-m", "phalanx"]
WRONG = ["--nproc-per-nodes", "2", "train.py"]
COMMANDS = {
    "phalanx run with a wrong argument": [*PHALANX, "run", *WRONG],
    "torchrun with a wrong argument": [sys.executable, "-m", "torch.distributed.run", *WRONG],
    "phalanx explain, a job that has ended": [*PHALANX, "explain"],
    "phalanx explain, no such job": [*PHALANX, "explain", "missing"],
    "python alone": [sys.executable, "-c", "pass"],
}
CODES = (2, 2, 0, 2, 0)


def measure(command: list[str], code: int, environment: dict[str, str]) -> tuple[float, float]:
    """Run a command; return the seconds that passed, and those of its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    passed = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != code:
        sys.exit(f"{command} ended with {done.returncode}: {done.stderr}")
    return passed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_failed_job(directory: Path, environment: dict[str, str]) -> None:
    script = directory / "failing.py"
    script.write_text(FAILING)
    command = [*PHALANX, "run", "--nproc-per-node", "2", str(script)]
    measure(command, 3, environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    cpu_seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "PHALANX_JOBS_DIR": str(Path(directory, "jobs"))}
        make_failed_job(Path(directory), environment)
        for number in range(-1, options.rounds):  # the first round fills the caches
            for (name, command), code in zip(COMMANDS.items(), CODES, strict=True):
                passed, cpu = measure(command, code, environment)
                if number >= 0:
                    seconds[name].append(passed)
                    cpu_seconds[name].append(cpu)
    for name, values in seconds.items():
        print(
            f"{name}: median {statistics.median(values):.3f} s, {min(values):.3f} to "
            f"{max(values):.3f} s; CPU {statistics.median(cpu_seconds[name]):.3f} s"
        )
    if options.output is not None:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        result = {
            "command": ["python", *sys.argv],
            "machine": machine(),
            "versions": versions(),
            "rounds": options.rounds,
            "median_seconds": medians,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
