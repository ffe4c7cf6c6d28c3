"""Two versions of Phalanx beside each other: has anything become slower?

    python benchmarks/before_after.py --before OTHER/bin/python --json benchmarks/before_after.json

OTHER is an environment with the version to compare with: check it out elsewhere and run
`make setup` there. The two versions take turns, each in processes of its own. `operations` times
small collectives and messages, called by Python in a loop; `bench` is `phalanx bench`, `rpc` is
`benchmarks/rpc` and `train` is `benchmarks/train_step.py`, all at 2 ranks. Given is how many times
as long as before each takes: the median and the quartiles of the runs. Rows of other systems, which
are the same before and after, show how far the machine itself varies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from phalanx.bench.machine import machine, versions

_HERE = Path(__file__).parent
_TOLERATED = 1.03

RANK = """
import json, time, torch, torch.distributed as dist
dist.init_process_group("phalanx")
rank = dist.get_rank()
one, two = torch.ones(1), torch.ones(2)
ones, others = [torch.ones(1), torch.ones(1)], [torch.ones(1), torch.ones(1)]

def ping():
    if rank:
        dist.recv(one, 0)
        dist.send(one, 0)
    else:
        dist.send(one, 1)
        dist.recv(one, 1)

def exchange():
    works = dist.irecv(one, 1 - rank), dist.isend(two[:1], 1 - rank)
    for work in works:
        work.wait()

operations = {
    "all_reduce": lambda: dist.all_reduce(one),
    "all_reduce, asynchronous": lambda: dist.all_reduce(one, async_op=True).wait(),
    "broadcast": lambda: dist.broadcast(one, 0),
    "gather": lambda: dist.gather(one, others if rank == 0 else None, 0),
    "scatter": lambda: dist.scatter(one, others if rank == 0 else None, 0),
    "all_gather": lambda: dist.all_gather(ones, one),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(two, one),
    "reduce_scatter": lambda: dist.reduce_scatter(one, ones),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, two),
    "all_to_all": lambda: dist.all_to_all(others, ones),
    "all_to_all_single": lambda: dist.all_to_all_single(two, torch.ones(2)),
    "barrier": dist.barrier,
    "send and recv": ping,
    "isend and irecv": exchange,
}
seconds = {name: [] for name in operations}
for _ in range(60):
    for name, operation in operations.items():
        begin = time.perf_counter()
        for _ in range(100):
            operation()
        seconds[name].append((time.perf_counter() - begin) / 100)
if rank == 0:
    # The 10th percentile: other work on the machine disturbs it least.
    print(json.dumps({name: sorted(times[10:])[5] for name, times in seconds.items()}))
dist.destroy_process_group()
"""

Figures = dict[str, float]
"""Seconds by what was measured."""


def operations(python: str) -> Figures:
    """Small operations, called in a loop: nearly all of it is the way through Python."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(RANK)
        script.flush()
        command = [python, "-m", "phalanx", "run", "--nproc-per-node", "2", script.name]
        lines = _output(command).splitlines()
    return dict(json.loads(next(line[line.index("{") :] for line in lines if "{" in line)))


def bench(python: str) -> Figures:
    """`phalanx bench` with every operation, at sizes within and beyond the caches."""
    options = "--systems phalanx --sizes 4,64KiB,4MiB,64MiB --rounds 5 --json".split()
    found = _document([python, "-m", "phalanx", "bench", *options])
    return {
        f"{figure['operation']}, {figure['size']} B": figure["timings"]["phalanx"]["median"]
        for figure in found["figures"]
    }


def rpc(python: str) -> Figures:
    """`benchmarks/rpc`: calls, the hybrid step, and lookups."""
    found = _document([python, str(_HERE / "rpc"), "--rounds", "5", "--output"])
    return {
        f"{what}, {system}": time["median"]
        for by_what in found["seconds"].values()
        for what, times in by_what.items()
        for system, time in times.items()
    }


def train(python: str) -> Figures:
    """`benchmarks/train_step.py`."""
    found = _document([python, str(_HERE / "train_step.py"), "--rounds", "15", "--json"])
    return {f"step, {system}": time["median"] for system, time in found["seconds"].items()}


PARTS: dict[str, Callable[[str], Figures]] = {
    "operations": operations,
    "bench": bench,
    "rpc": rpc,
    "train": train,
}


def ratios(part: str, before: str, after: str, runs: int) -> Iterator[tuple[str, list[float]]]:
    """Yield what was measured, and the quartiles of how many times as long it takes."""
    found: dict[str, list[float]] = {}
    for run in track(range(runs), f"{part:10}", console=Console(stderr=True)):
        pair = (before, after) if run % 2 == 0 else (after, before)
        times = {python: PARTS[part](python) for python in pair}
        for what, seconds in times[before].items():
            found.setdefault(what, []).append(times[after][what] / seconds)
    for what, values in found.items():
        yield what, [round(value, 4) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--before", required=True, help="python of the version to compare with")
    parser.add_argument("--runs", type=int, default=5, help="of each version, 2 or more")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{sorted(unknown)}: expected some of {', '.join(PARTS)}")
    found = {
        part: dict(ratios(part, options.before, sys.executable, options.runs))
        for part in options.parts or PARTS
    }
    table = Table("part", "figure", "times as long", "quartiles", box=None)
    for part, figures in found.items():
        for what, (low, median, high) in figures.items():
            style = "bold red" if low > _TOLERATED else None
            table.add_row(part, what, f"{median:.3f}", f"{low:.3f} - {high:.3f}", style=style)
    Console().print(table)
    if options.json:
        document = {"machine": machine(), "versions": versions(), "runs": options.runs}
        options.json.write_text(json.dumps({**document, "ratios": found}, indent=1) + "\n")


def _output(command: list[str]) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr}")
    return done.stdout


def _document(command: list[str]) -> Any:
    """Return the JSON that a command writes to the file that is its last argument."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.json")
        _output([*command, str(path)])
        return dict(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
