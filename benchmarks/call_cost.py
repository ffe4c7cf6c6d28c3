"""The cost of a call, beside that of a group that does nothing: `python benchmarks/call_cost.py`.

One rank calls `dist.all_reduce` with 4 B, in turns on a group of Phalanx and on a group in Python
whose method returns at once. With no peers to wait for, the difference is the cost of Phalanx. The
same operation prepared runs on that group and on one without a flight recorder. PyTorch's fake
backend, which is compiled and does nothing, shows what any compiled backend costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import phalanx
from phalanx import _native
from phalanx.backend.work import FinishedWork
from phalanx.bench.machine import machine, versions


class IdleGroup(dist.ProcessGroup):
    """A group whose operations do nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._work = FinishedWork([])

    def allreduce(self, _tensors: Any, _opts: Any) -> dist.Work:
        """Return a work that has ended, as Phalanx does."""
        return self._work


def time_plain(group: Any, tensor: torch.Tensor, calls: int) -> float:
    all_reduce = dist.all_reduce
    start = time.perf_counter()
    for _ in range(calls):
        all_reduce(tensor, group=group)
    return (time.perf_counter() - start) / calls * 1e6


def time_prepared(group: Any, tensor: torch.Tensor, calls: int) -> float:
    all_reduce = phalanx.prepare(dist.all_reduce, tensor, group=group)
    start = time.perf_counter()
    for _ in range(calls):
        all_reduce()
    return (time.perf_counter() - start) / calls * 1e6


def form_groups() -> dict[str, tuple[Callable[..., float], Any]]:
    """Form the groups; return how each is timed."""
    recorded = dist.group.WORLD
    idle = IdleGroup()
    c10d._world.pg_group_ranks[idle] = {0: 0}
    _native.detach_flight_recorder()
    unrecorded = dist.new_group([0])
    return {
        "phalanx": (time_plain, recorded),
        "idle group": (time_plain, idle),
        "idle compiled backend": (time_plain, dist.new_group([0], backend="fake")),
        "prepared": (time_prepared, recorded),
        "prepared, without a recorder": (time_prepared, unrecorded),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=20_000, help="per round")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    times: dict[str, list[float]] = defaultdict(list)
    with phalanx.init():
        ways = form_groups()
        for number in range(-1, options.rounds):  # the first round fills the caches
            for name, (measure, group) in ways.items():
                passed = measure(group, torch.ones(1), options.calls)
                if number >= 0:
                    times[name].append(passed)
    for name, values in times.items():
        lower, median, upper = statistics.quantiles(values, n=4)
        print(f"{name}: {median:.3f} us per call (quartiles {lower:.3f} and {upper:.3f})")
    ratios = dict[str, list[float]]()
    for idle in ("idle group", "idle compiled backend"):
        pairs = zip(times["phalanx"], times[idle], strict=True)
        ratios[idle] = statistics.quantiles([ours / other for ours, other in pairs], n=4)
        print(
            "{1:.2f} times the {name} (quartiles {0:.2f} and {2:.2f})".format(
                *ratios[idle], name=idle
            )
        )
    pairs = zip(times["prepared"], times["prepared, without a recorder"], strict=True)
    recorder = statistics.quantiles([(one - other) * 1e3 for one, other in pairs], n=4)
    print("the recorder: {1:.0f} ns (quartiles {0:.0f} and {2:.0f})".format(*recorder))
    if options.output:
        record = {
            "machine": machine(),
            "versions": versions(),
            "rounds": options.rounds,
            "calls": options.calls,
            "microseconds": {name: [round(t, 3) for t in each] for name, each in times.items()},
            "ratios": {
                name: [round(each, 3) for each in quartiles] for name, quartiles in ratios.items()
            },
            "recorder_ns": [round(each, 1) for each in recorder],
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
