"""Waiting on busy machines: `python benchmarks/waiting.py [--output FILE]`, about twenty minutes.

Ranks call an all-reduce of 4 B, at once again or after computing for some milliseconds, in these
conditions: alone; beside one and two busy processes; with cores that a hypervisor takes away now
and then, which a real-time process imitates (for root only); twice as many ranks as cores. The
systems are Phalanx, Gloo, and MPI as it waits by default (spinning) and yielding.

A latency is the time from the arrival of the last rank to the return of a rank, since waiting for
a rank that computes is not the system's fault. The other results are the CPU time of the ranks
outside their computation, in cores, and the CPU time that the busiest neighbour got, as a share of
a fair division of the cores. Computation is measured in CPU time: a rank that another process
displaces arrives later.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from phalanx.bench import systems
from phalanx.bench.machine import machine, versions
from phalanx.launcher.host_resources import usable_cores

SYSTEMS = ("phalanx", "gloo", "openmpi", "openmpi-yield", "mpich")
_YIELD = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_mpi_yield_when_idle": "1"}
_WARM_UP_SECONDS = 0.3


@dataclass(frozen=True)
class Condition:
    """The circumstances of a measurement.

    Attributes:
        name: A name for the table.
        ranks_per_core: The number of ranks on each core.
        busy: The number of busy processes beside them.
        stolen: Whether a real-time process takes the cores now and then.
    """

    name: str
    ranks_per_core: int = 1
    busy: int = 0
    stolen: bool = False


CONDITIONS = (
    Condition("alone"),
    Condition("1 busy process", busy=1),
    Condition("2 busy processes", busy=2),
    Condition("stolen cores", stolen=True),
    Condition("2 ranks per core", ranks_per_core=2),
)


# ---- a rank ----


def bind_torch(backend: str) -> tuple[Callable[[int], int], Callable[[], None], int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    tensor = torch.zeros(1, dtype=torch.int32)

    def call(value: int) -> int:
        tensor[0] = value
        begin = time.perf_counter_ns()
        dist.all_reduce(tensor)
        samples.append((begin, time.perf_counter_ns()))
        return int(tensor[0])

    return call, dist.destroy_process_group, dist.get_rank()


def bind_mpi() -> tuple[Callable[[int], int], Callable[[], None], int]:
    from mpi4py import MPI

    world, array = MPI.COMM_WORLD, np.zeros(1, np.int32)

    def call(value: int) -> int:
        array[0] = value
        begin = time.perf_counter_ns()
        world.Allreduce(MPI.IN_PLACE, array)
        samples.append((begin, time.perf_counter_ns()))
        return int(array[0])

    return call, MPI.Finalize, world.Get_rank()


samples: list[tuple[int, int]] = []
"""The begin and end of each operation of this rank, in nanoseconds of the monotonic clock."""


def compute(seconds: float) -> None:
    """Compute until this thread has used CPU time."""
    end = time.thread_time() + seconds
    values = np.ones(1000)
    while time.thread_time() < end:
        values *= 1.0


def run_rank(system: str, gap: float, seconds: float, output: Path) -> None:
    call, close, rank = bind_mpi() if "mpi" in system else bind_torch(system)
    end = time.monotonic() + _WARM_UP_SECONDS
    while not call(int(rank == 0 and time.monotonic() > end)):  # rank 0 ends the loop for all
        pass
    samples.clear()
    end = time.monotonic() + seconds
    used = time.process_time()
    while not call(int(rank == 0 and time.monotonic() > end)):
        if gap:
            compute(gap)
    used = time.process_time() - used - gap * (len(samples) - 1)
    np.savez(output / f"{rank}.npz", samples=np.array(samples), used=used)
    close()


# ---- the driver ----


def processes(system: str, ranks: int, command: list[str]) -> list[systems.Program]:
    found = systems.programs(system.removesuffix("-yield"), ranks, command)
    if not system.endswith("-yield"):
        return found
    return [systems.Program(each.arguments, {**each.environment, **_YIELD}) for each in found]


@contextmanager
def neighbours(condition: Condition) -> Iterator[list[psutil.Process]]:
    """Run the other processes of a condition; give the busy ones."""
    busy = [sys.executable, "-c", "while True: pass"]
    thief = [sys.executable, __file__, "--steal"]
    with ExitStack() as stack:
        started = []
        for command in [busy] * condition.busy + [thief] * condition.stolen:
            process = subprocess.Popen(command)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(psutil.Process(process.pid))
        yield started[: condition.busy]


def steal() -> None:
    """Take one core after the other for 3 ms, ten times a second, as a hypervisor may do."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    cores = sorted(os.sched_getaffinity(0))
    while True:
        for core in cores:
            os.sched_setaffinity(0, [core])
            end = time.monotonic() + 0.003
            while time.monotonic() < end:
                pass
            time.sleep(0.1 / len(cores))


def measure(condition: Condition, system: str, gap: float, seconds: float) -> dict[str, float]:
    ranks = condition.ranks_per_core * usable_cores()
    with tempfile.TemporaryDirectory() as folder, neighbours(condition) as busy:
        command = [sys.executable, __file__, "--rank", system, "--folder", folder]
        command += ["--gap", str(gap), "--seconds", str(seconds)]
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        running = [
            subprocess.Popen(each.arguments, env={**os.environ, **store, **each.environment})
            for each in processes(system, ranks, command)
        ]
        before = [(time.monotonic(), sum(each.cpu_times()[:2])) for each in busy]
        for each in running:
            if each.wait(120) != 0:
                raise SystemExit(f"{system}: exit code {each.returncode}")
        shares = [
            (sum(each.cpu_times()[:2]) - used) / (time.monotonic() - start)
            for each, (start, used) in zip(busy, before, strict=True)
        ]
        results = [np.load(Path(folder) / f"{rank}.npz") for rank in range(ranks)]
    times = np.stack([each["samples"] for each in results])  # [ranks, operations, 2]
    latencies = (times[:, :, 1] - times[:, :, 0].max(axis=0)) / 1000
    wall = (times[:, -1, 1] - times[:, 0, 0]).max() / 1e9
    fair = min(1.0, usable_cores() / (ranks + condition.busy))
    percentiles = np.percentile(latencies, [50, 90, 99])
    return {
        **dict(zip(("p50", "p90", "p99"), map(float, percentiles), strict=True)),
        "mean": float(latencies.mean()),
        "cores": float(sum(each["used"] for each in results) / wall),
        "neighbour": min(shares) / fair if shares else float("nan"),
        "operations": float(times.shape[1]),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_possible(condition: Condition) -> bool:
    if not condition.stolen:
        return True
    can = os.geteuid() == 0
    if not can:
        print("stolen cores: left out, since only root may start real-time processes")
    return can


def median_rows(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--steal", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gap", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--gaps", type=float, nargs="+", default=[0, 0.001, 0.01, 0.05])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--conditions", nargs="+", choices=[c.name for c in CONDITIONS])
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if options.steal:
        steal()
    if options.rank:
        run_rank(options.rank, options.gap, options.seconds, options.folder)
        return
    wanted = [c for c in CONDITIONS if not options.conditions or c.name in options.conditions]
    rows: list[dict[str, Any]] = []
    for condition in filter(is_possible, wanted):
        for gap in options.gaps:
            rounds = defaultdict(list)
            for _ in range(options.rounds):
                for system in options.systems:
                    rounds[system].append(measure(condition, system, gap, options.seconds))
            print(f"\n{condition.name}, {gap * 1000:g} ms of computation between operations")
            print(f"{'':14} {'p50 us':>9} {'p90':>9} {'p99':>9} {'cores':>6} {'neighbour':>9}")
            for system, each in rounds.items():
                row = median_rows(each)
                rows.append(
                    {"condition": asdict(condition), "gap": gap, "system": system, "rounds": each}
                )
                print(
                    f"{system:14} {row['p50']:9.1f} {row['p90']:9.1f} {row['p99']:9.1f} "
                    f"{row['cores']:6.2f} {row['neighbour']:9.0%}",
                    flush=True,
                )
    if options.output:
        record = {"machine": machine(), "versions": versions(), "rows": rows}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
