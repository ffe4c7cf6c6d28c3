"""Compare `phalanx.rpc` with `torch.distributed.rpc`.

    python benchmarks/rpc --output benchmarks/rpc.json

`calls`: round trips of an empty call and of tensors. `hybrid`: the step of PyTorch's tutorial, a
parameter server beside DDP. `lookups`: four trainers and one server. The systems take turns in one
run. The output shows medians over the rounds with quartiles, and each system's time as a multiple
of the first system's.
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
        "measures",
        nargs="*",
        choices=[*measures, []],
        metavar="|".join(measures),
        help="default: all",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to FILE")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    results = {name: measures[name](arguments.rounds) for name in arguments.measures or measures}
    if arguments.output:
        seconds = {
            name: {
                description: {system: asdict(time) for system, time in times.items()}
                for description, times in by_description.items()
            }
            for name, by_description in results.items()
        }
        document = {"machine": machine(), "versions": versions(), "seconds": seconds}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
