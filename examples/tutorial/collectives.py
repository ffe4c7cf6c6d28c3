"""Run the six collectives, every reduction, and a collective of a sub-group.

phalanx run --nproc-per-node 3 collectives.py
"""

import sys

import torch
import torch.distributed as dist

import phalanx

OPERATORS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")


def run_collectives(rank: int, world_size: int) -> dict[str, object]:
    """Return the result of each collective on this rank."""
    results: dict[str, object] = {}
    numbers = [torch.tensor([number]) for number in range(world_size)]

    tensor = torch.tensor([7]) if rank == 0 else torch.empty(1, dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    results["broadcast"] = tensor.tolist()

    tensor = torch.empty(1, dtype=torch.int64)
    dist.scatter(tensor, numbers if rank == 0 else None, src=0)
    results["scatter"] = tensor.tolist()

    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.gather(tensor, parts if rank == 0 else None, dst=0)
    results["gather"] = [part.item() for part in parts] if rank == 0 else "-"

    dist.all_gather(parts, tensor)
    results["all_gather"] = [part.item() for part in parts]

    tensor = torch.tensor([rank + 1])
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    results["reduce"] = tensor.tolist() if rank == 0 else "-"

    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    results["all_reduce"] = tensor.tolist()
    return results


def run_operators(rank: int, backend: str) -> dict[str, int]:
    """Return the all-reduce of the numbers 1, 2, ... by each operator that the backend has."""
    results = {}
    for name in OPERATORS:
        if name == "AVG" and backend == "gloo":
            continue  # Gloo has no average
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        results[name] = int(tensor.item())
    return results


def sum_even_and_odd(rank: int, world_size: int) -> int:
    """Return the sum over the ranks that are even, or odd, as this one is."""
    # Every rank creates every group, even those that it is not in, in the same order.
    groups = [dist.new_group(list(range(first, world_size, 2))) for first in (0, 1)]
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor, group=groups[rank % 2])
    return int(tensor.item())


if __name__ == "__main__":
    with phalanx.init(*sys.argv[1:2]) as session:
        if session.world_size == 1:
            sys.exit("groups need two ranks: phalanx run --nproc-per-node 3 collectives.py")
        for name, result in run_collectives(session.rank, session.world_size).items():
            print(f"{name}: {result}")
        for name, value in run_operators(session.rank, session.backend).items():
            print(f"{name}: {value}")
        parity = "odd" if session.rank % 2 else "even"
        print(f"sum of the {parity} ranks: {sum_even_and_odd(session.rank, session.world_size)}")
