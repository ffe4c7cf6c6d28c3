"""Run each collective once, and print the result of every rank.

python examples/collectives.py
"""

import argparse

import torch
import torch.distributed as dist

import phalanx

ROOT = 0


def run_collectives(backend: str) -> dict[str, object]:
    """Run on every rank; return the result of each collective on it."""
    with phalanx.init(backend) as session:
        rank, ranks = session.rank, range(session.world_size)
        is_root = rank == ROOT
        results: dict[str, object] = {}

        # Broadcast: the root's tensor is sent to all ranks.
        tensor = torch.tensor([7.0, 8.0]) if is_root else torch.empty(2)
        dist.broadcast(tensor, src=ROOT)
        results["broadcast"] = tensor.tolist()

        # Reduce: the root gets the sum over all ranks; the tensors of the other ranks are
        # undefined.
        tensor = torch.tensor([1.0, rank])
        dist.reduce(tensor, dst=ROOT, op=dist.ReduceOp.SUM)
        results["reduce"] = tensor.tolist() if is_root else None

        # All-reduce: all ranks get the sum.
        tensor = torch.tensor([1.0, rank])
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        results["all_reduce"] = tensor.tolist()

        # Scatter: the root sends a different tensor to each rank.
        tensor = torch.empty(2)
        parts = [torch.tensor([10.0 * to, 1.0]) for to in ranks] if is_root else None
        dist.scatter(tensor, parts, src=ROOT)
        results["scatter"] = tensor.tolist()

        # Gather: the root receives a tensor from each rank.
        collected = [torch.empty(1) for _ in ranks] if is_root else None
        dist.gather(torch.tensor([rank * 1.5]), collected, dst=ROOT)
        results["gather"] = [part.tolist() for part in collected] if collected else None

        # All-gather: all ranks receive a tensor from each rank.
        collected = [torch.empty(1) for _ in ranks]
        dist.all_gather(collected, torch.tensor([rank * 1.5]))
        results["all_gather"] = [part.tolist() for part in collected]

        # Barrier: no rank continues before all have reached it.
        dist.barrier()
        results["barrier"] = "passed"
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Run each collective once.")
    parser.add_argument("--nproc-per-node", type=int, default=4, help="ranks to start (4)")
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    options = parser.parse_args()
    if options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node {options.nproc_per_node} given, expected at least 1")
    results = phalanx.launch(run_collectives, options.nproc_per_node, (options.backend,))
    for collective in results[0]:
        print(collective)
        for rank, result in enumerate(results):
            print(f"  rank {rank}: {'-' if result[collective] is None else result[collective]}")


if __name__ == "__main__":
    main()
