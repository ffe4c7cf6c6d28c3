"""The time and memory to explain dumps of many ranks: `python benchmarks/torch_dumps.py`.

Each rank has one dump of PyTorch's Flight Recorder, as NCCL writes it: collectives of two groups
with three frames each; all ranks but one wait in the last one. `phalanx explain --dumps` and
PyTorch's own analyzer, `torch.distributed.flight_recorder.fr_trace`, take turns, each in a new
process. The memory is that of the largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from phalanx.bench.machine import machine, versions
from tests.torch_dumps import SECOND, DumpBuilder

PREFIX = "nccl_trace_rank_"


def write_dumps(folder: Path, ranks: int, entries: int) -> int:
    """Write a dump of each rank; return the rank that is at fault.

    The ranks of a half have the same calls, so three of them are built.
    """
    builder = DumpBuilder(3)
    builder.config["0"]["ranks"] = str([*range(ranks)])
    builder.add_group("1", [*range(ranks // 2)])
    builder.add_group("2", [*range(ranks // 2, ranks)])
    for number in range(entries - 1):
        line = number % 50
        if number % 2:
            builder.call([0], group="1", done=True, line=line)
            builder.call([1, 2], group="2", done=True, line=line)
        else:
            builder.call(range(3), done=True, line=line)
    builder.call([0, 1], line=90)
    contents = [pickle.dumps(builder.get_content(rank), protocol=2) for rank in range(3)]
    missing = ranks - 2
    for rank in range(ranks):
        kind = 2 if rank == missing else int(rank >= ranks // 2)
        file = folder / f"{PREFIX}{rank}"
        file.write_bytes(contents[kind])
        os.utime(file, ns=(builder.time + 30 * SECOND,) * 2)
    return missing


def measure(command: list[str]) -> tuple[float, float, str]:
    """Run a command; return its seconds, the MiB of its largest process, and what it prints."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text = process.stdout.read() if process.stdout else ""
    _, _, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - start, usage.ru_maxrss / 1024, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rival-rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"phalanx": [], "fr_trace": []}
    memory: dict[str, list[float]] = {"phalanx": [], "fr_trace": []}
    named: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        missing = write_dumps(Path(folder), options.ranks, options.entries)
        analyzer = "torch.distributed.flight_recorder.fr_trace"
        commands = {
            "phalanx": [sys.executable, "-m", "phalanx", "explain", "--dumps", folder],
            "fr_trace": [sys.executable, "-m", analyzer, "-p", PREFIX, folder],
        }
        for number in range(options.rounds):
            for name, command in commands.items():
                if name == "fr_trace" and number >= options.rival_rounds:
                    continue
                passed, size, text = measure(command)
                seconds[name].append(passed)
                memory[name].append(size)
                texts = f"Rank {missing} has been in its own code", f"missing ranks: {{{missing}}}"
                named[name] = any(each in text for each in texts)
                print(f"{name}: {passed:.1f} s, {size:.0f} MiB, names the rank: {named[name]}")
                print(f"  {text[:400]!r}")
    if options.output is not None:
        result = {
            "command": ["python", *sys.argv],
            "machine": machine(),
            "versions": versions(),
            "ranks": options.ranks,
            "entries": options.entries,
            "median_seconds": {n: statistics.median(each) for n, each in seconds.items() if each},
            "seconds": seconds,
            "mebibytes": memory,
            "names_the_rank": named,
            "cores": len(os.sched_getaffinity(0)),
            "peak_of_children": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
