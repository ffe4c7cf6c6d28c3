"""The cost of keeping PyTorch's records, on Gloo: `python benchmarks/torch_recorder.py`.

Two ranks train the ConvNet of `data_parallel.py` with DDP on Gloo under `phalanx run`. The thread
that keeps PyTorch's record in the job's directory works and rests in turn, for some seconds each,
in the same processes: two runs of one program differ by more than the cost. PyTorch's record itself
is made all the time, as is its default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.bench.machine import machine, versions
from phalanx.recorder import torch_recorder

sys.path.insert(0, str(Path(__file__).parent))
from data_parallel import Step

WARM_UP = 500
"""Steps until the thread glances as seldom as it does later."""


def run_rank(rounds: int, steps: int) -> None:
    """Train, and print the seconds of a step on rank 0 in each part of each round."""
    recorder = torch_recorder._TorchRecorder
    glance, rests = recorder._glance, False

    def glance_or_rest(*arguments: Any, **options: Any) -> None:
        if not rests:
            glance(*arguments, **options)

    recorder._glance = glance_or_rest  # type: ignore[method-assign]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = Step("convnet", "ddp_gloo", None)
    step.run(WARM_UP)
    for number in range(rounds):
        seconds = {}
        for rests in (False, True) if number % 2 else (True, False):
            seconds["rests" if rests else "works"] = step.run(steps)
        if dist.get_rank() == 0:
            print(json.dumps(seconds), flush=True)
    rests = False
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rounds, options.steps)
        return
    size = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", __file__]
    process = subprocess.Popen([*command, *size, "--rank"], stdout=subprocess.PIPE, text=True)
    seconds = []
    for line in process.stdout or ():
        seconds.append(json.loads(line[line.index("{") :]))  # after the prefix
        print(", ".join(f"{part} {value * 1e3:.3f} ms" for part, value in seconds[-1].items()))
    if process.wait():
        sys.exit(process.returncode)
    ratios = [each["works"] / each["rests"] for each in seconds]
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"a step takes {median:.4f} times as long with the thread ({low:.4f} to {high:.4f})")
    if options.output is not None:
        result = {
            "command": ["python", *sys.argv],
            "machine": machine(),
            "versions": versions(),
            "time": time.time(),
            "seconds": seconds,
            "ratios": ratios,
            "median": median,
            "quartiles": [low, high],
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
