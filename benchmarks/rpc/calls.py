"""Round trips: an empty call, and one that takes and returns a tensor."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from systems import SYSTEMS, join
from turns import Team, compare, median_of, said

CALLS = {"empty call": (0, 200), "64 KiB": (2**14, 100), "4 MiB": (2**20, 20)}


def nothing() -> None:
    """Do nothing."""


def echo(value: Any) -> Any:
    """Give back what came."""
    return value


def work(
    rank: int, folder: str, rounds: Iterable[None], tell: Callable[[float], None], *options: Any
) -> None:
    """One of two workers; the first calls the second."""
    system, size, count = options
    torch.set_num_threads(1)
    rpc = join(system, folder, f"worker-{rank}", rank, 2)
    if rank == 0:
        tensor = torch.randn(size)

        def once() -> None:
            if size:
                rpc.rpc_sync("worker-1", echo, args=(tensor,))
            else:
                rpc.rpc_sync("worker-1", nothing)

        for _ in rounds:
            tensor.add_(1)
            tell(median_of(once, count, time.perf_counter))
    rpc.shutdown()


def measure(rounds: int) -> dict[str, Any]:
    """All of them."""
    found = {}
    for what, (size, count) in CALLS.items():
        teams = [Team(system, work, 2, (system, size, count)) for system in SYSTEMS]
        found[what] = compare(teams, rounds, what)
        print(f"{what:10}  {said(found[what])}")
    return found
