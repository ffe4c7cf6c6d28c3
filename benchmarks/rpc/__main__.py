"""`phalanx.rpc` beside `torch.distributed.rpc`.

    python benchmarks/rpc --json benchmarks/rpc.json

`calls`: an empty call, and tensors there and back. `hybrid`: the step of PyTorch's tutorial, a
parameter server beside DDP. `lookups`: four trainers and one server. The systems take turns in one
run; given are medians over the rounds with the quartiles, and how many times as long as the first
system each takes.
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import calls
import hybrid
import lookups

from phalanx.bench.machine import machine, versions

if __name__ == "__main__":
    measures = {
        "calls": calls.measure,
        "hybrid": hybrid.measure,
        "lookups": lookups.measure,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="*", choices=[*measures, []], metavar="|".join(measures), help="default: all"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    found = {name: measures[name](arguments.rounds) for name in arguments.what or measures}
    if arguments.json:
        seconds = {
            name: {
                what: {system: asdict(time) for system, time in times.items()}
                for what, times in by_what.items()
            }
            for name, by_what in found.items()
        }
        everything = {"machine": machine(), "versions": versions(), "seconds": seconds}
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")
