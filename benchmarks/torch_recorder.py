"""The cost of keeping PyTorch's records, on Gloo: `python benchmarks/torch_recorder.py`.

Two ranks train the ConvNet of `data_parallel.py` with DDP on Gloo under `phalanx run`. In turn, as
new processes: without any record, with PyTorch's Flight Recorder alone, and with the thread that
keeps its record in the job's directory, which is the default. The results are the ratios of the
mean steps of runs of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.bench.machine import machine, versions
from phalanx.env import NO_JOB

sys.path.insert(0, str(Path(__file__).parent))
from data_parallel import Step

MODES: dict[str, dict[str, str]] = {
    "no record": {"PHALANX_JOB": NO_JOB, "TORCH_FR_BUFFER_SIZE": "0"},
    "PyTorch's record": {"PHALANX_JOB": NO_JOB},
    "kept record": {},
}
WARM_UP = 100


def run_rank(steps: int) -> None:
    """Train, and print the seconds of a step on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = Step("convnet", "ddp_gloo", None)
    step.run(WARM_UP)
    seconds = step.run(steps)
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()


def measure(mode: str, steps: int) -> float:
    """Return the seconds of a step in a mode."""
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, __file__, "--steps", str(steps), "--rank"],
        env={**os.environ, **MODES[mode]},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])  # after the prefix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if options.rank:
        run_rank(options.steps)
        return
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds):
        modes = list(MODES)
        for mode in modes[number % 3 :] + modes[: number % 3]:
            seconds[mode].append(measure(mode, options.steps))
        print(f"round {number}: " + ", ".join(f"{m} {seconds[m][-1] * 1e3:.2f} ms" for m in modes))
    first, *others = MODES
    ratios = {
        mode: [a / b for a, b in zip(seconds[mode], seconds[first], strict=True)] for mode in others
    }
    for mode, values in ratios.items():
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{mode}: {median:.4f} times the step without a record ({low:.4f} to {high:.4f})")
    if options.output is not None:
        result = {
            "command": ["python", *sys.argv],
            "machine": machine(),
            "versions": versions(),
            "time": time.time(),
            "seconds": seconds,
            "ratios": ratios,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
