"""Comparison of the speed of two versions of Phalanx.

    python benchmarks/before_after.py --before OTHER/bin/python --output FILE

OTHER is the environment (.venv) of the version to compare with: check it out elsewhere and run
`make setup` there. The two versions take turns, each in its own processes and with its own scripts.
`operations` times small collectives and messages, called by Python in a loop; `bench` is `phalanx
bench`, `rpc` is `benchmarks/rpc`, `train` is `benchmarks/train_step.py`, and `data_parallel` is
`benchmarks/data_parallel.py`, all with 2 ranks. The results are ratios of the time after to the
time before: the median and the quartiles of the runs. Measurements that only one version has are
left out. Rows of other systems, which are the same before and after, show how much the machine
varies.
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

_TOLERANCE = 1.03

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
    # The 10th percentile is least affected by other work on the machine.
    print(json.dumps({name: sorted(times[10:])[5] for name, times in seconds.items()}))
dist.destroy_process_group()
"""

Results = dict[str, float]
"""Seconds by name of the measurement."""


def operations(python: str) -> Results:
    """Time small operations in a loop; nearly all of the time is spent in Python."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(RANK)
        script.flush()
        command = [python, "-m", "phalanx", "run", "--nproc-per-node", "2", script.name]
        lines = _run(command).splitlines()
    return dict(json.loads(next(line[line.index("{") :] for line in lines if "{" in line)))


def bench(python: str) -> Results:
    """Run `phalanx bench` with every operation, at sizes within and beyond the caches."""
    options = "--systems phalanx --sizes 4,64KiB,4MiB,64MiB --rounds 5 --output".split()
    document = _read_output([python, "-m", "phalanx", "bench", *options])
    return {
        f"{result['operation']}, {result['size']} B": result["timings"]["phalanx"]["median"]
        for result in document["results"]
    }


def rpc(python: str) -> Results:
    """Run `benchmarks/rpc`: calls, the hybrid step, and lookups."""
    document = _read_output([python, _script(python, "rpc"), "--rounds", "5", "--output"])
    return {
        f"{name}, {system}": time["median"]
        for seconds_by_name in document["seconds"].values()
        for name, times in seconds_by_name.items()
        for system, time in times.items()
    }


def _script(python: str, name: str) -> str:
    """Return the path of a benchmark in the checkout of an environment."""
    return str(Path(python).absolute().parents[2] / "benchmarks" / name)


def train(python: str) -> Results:
    """Run `benchmarks/train_step.py`."""
    document = _read_output(
        [python, _script(python, "train_step.py"), "--rounds", "15", "--output"]
    )
    return {f"step, {system}": time["median"] for system, time in document["seconds"].items()}


def data_parallel(python: str) -> Results:
    """Run `benchmarks/data_parallel.py` with its model that is bound by communication."""
    command = [python, _script(python, "data_parallel.py"), "--rounds", "7", "--output"]
    document = _read_output(command)
    return {
        f"data parallelism, {mode}": time["median"] for mode, time in document["seconds"].items()
    }


PARTS: dict[str, Callable[[str], Results]] = {
    "operations": operations,
    "bench": bench,
    "rpc": rpc,
    "train": train,
    "data_parallel": data_parallel,
}


def ratios(part: str, before: str, after: str, runs: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the name of each measurement and the quartiles of its ratios."""
    values_by_name: dict[str, list[float]] = {}
    for run in track(range(runs), f"{part:10}", console=Console(stderr=True)):
        pair = (before, after) if run % 2 == 0 else (after, before)
        times = {python: PARTS[part](python) for python in pair}
        for name, seconds in times[before].items():
            if name in times[after]:
                values_by_name.setdefault(name, []).append(times[after][name] / seconds)
    for name, values in values_by_name.items():
        yield name, [round(value, 4) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--before", required=True, help="python of the version to compare with")
    parser.add_argument("--runs", type=int, default=5, help="runs of each version, 2 or more")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the results as JSON to this file"
    )
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{sorted(unknown)}: expected one or several of {', '.join(PARTS)}")
    results = {
        part: dict(ratios(part, options.before, sys.executable, options.runs))
        for part in options.parts or PARTS
    }
    table = Table("part", "measurement", "ratio", "quartiles", box=None)
    for part, ratios_by_name in results.items():
        for name, (low, median, high) in ratios_by_name.items():
            style = "bold red" if low > _TOLERANCE else None
            table.add_row(part, name, f"{median:.3f}", f"{low:.3f} - {high:.3f}", style=style)
    Console().print(table)
    if options.output:
        document = {"machine": machine(), "versions": versions(), "runs": options.runs}
        options.output.write_text(json.dumps({**document, "ratios": results}, indent=1) + "\n")


def _run(command: list[str]) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr}")
    return done.stdout


def _read_output(command: list[str]) -> Any:
    """Return the JSON that a command writes to the file that is its last argument."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        _run([*command, str(path)])
        return dict(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
