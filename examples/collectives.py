"""Each collective once, with what every rank holds afterwards.

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
        at_root = rank == ROOT
        results: dict[str, object] = {}

        # One rank's tensor goes to all.
        tensor = torch.tensor([7.0, 8.0]) if at_root else torch.empty(2)
        dist.broadcast(tensor, src=ROOT)
        results["broadcast"] = tensor.tolist()

        # The sum over all ranks goes to one of them; what the others hold then is undefined.
        tensor = torch.tensor([1.0, rank])
        dist.reduce(tensor, dst=ROOT, op=dist.ReduceOp.SUM)
        results["reduce"] = tensor.tolist() if at_root else None

        # The same, to all of them.
        tensor = torch.tensor([1.0, rank])
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        results["all_reduce"] = tensor.tolist()

        # One rank deals out a tensor to each.
        tensor = torch.empty(2)
        hands = [torch.tensor([10.0 * to, 1.0]) for to in ranks] if at_root else None
        dist.scatter(tensor, hands, src=ROOT)
        results["scatter"] = tensor.tolist()

        # One rank collects a tensor of each.
        collected = [torch.empty(1) for _ in ranks] if at_root else None
        dist.gather(torch.tensor([rank * 1.5]), collected, dst=ROOT)
        results["gather"] = [part.tolist() for part in collected] if collected else None

        # All of them do.
        collected = [torch.empty(1) for _ in ranks]
        dist.all_gather(collected, torch.tensor([rank * 1.5]))
        results["all_gather"] = [part.tolist() for part in collected]

        # Nobody goes on before all are here.
        dist.barrier()
        results["barrier"] = "passed"
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Run each collective once.")
    parser.add_argument("--nproc", type=int, default=4, help="ranks to start (4)")
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    options = parser.parse_args()
    if options.nproc < 1:
        parser.error(f"--nproc {options.nproc} given, expected at least 1")
    results = phalanx.launch(run_collectives, options.nproc, (options.backend,))
    for collective in results[0]:
        print(collective)
        for rank, result in enumerate(results):
            print(f"  rank {rank}: {'-' if result[collective] is None else result[collective]}")


if __name__ == "__main__":
    main()
