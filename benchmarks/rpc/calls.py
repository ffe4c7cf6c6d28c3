"""Round trips: an empty call, and a call that takes and returns a tensor."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from systems import SYSTEMS, join
from turns import Team, compare, format_timings, measure_median

CALLS = {"empty call": (0, 200), "64 KiB": (2**14, 100), "4 MiB": (2**20, 20)}


def nothing() -> None:
    """Do nothing."""


def echo(value: Any) -> Any:
    """Return the argument."""
    return value


def work(
    rank: int, folder: str, rounds: Iterable[None], report: Callable[[float], None], *options: Any
) -> None:
    """Run as one of two workers; the first calls the second."""
    system, size, count = options
    torch.set_num_threads(1)
    rpc = join(system, folder, f"worker-{rank}", rank, 2)
    if rank == 0:
        tensor = torch.randn(size)

        def call() -> None:
            if size:
                rpc.rpc_sync("worker-1", echo, args=(tensor,))
            else:
                rpc.rpc_sync("worker-1", nothing)

        for _ in rounds:
            tensor.add_(1)
            report(measure_median(call, count, time.perf_counter))
    rpc.shutdown()


def measure(rounds: int) -> dict[str, Any]:
    """Measure all calls with all systems."""
    results = {}
    for description, (size, count) in CALLS.items():
        teams = [Team(system, work, 2, (system, size, count)) for system in SYSTEMS]
        results[description] = compare(teams, rounds, description)
        print(f"{description:10}  {format_timings(results[description])}")
    return results
