"""Non-blocking messages: every rank sends to both neighbours, and computes meanwhile.

python examples/isend_irecv.py
"""

import argparse

import torch
import torch.distributed as dist

import phalanx


def exchange(backend: str) -> str:
    """Run on every rank: swap numbers with the neighbours in a ring."""
    with phalanx.init(backend) as session:
        rank, world_size = session.rank, session.world_size
        left, right = (rank - 1) % world_size, (rank + 1) % world_size
        own = torch.tensor([float(rank)])
        from_left, from_right = torch.empty(1), torch.empty(1)
        # Tags distinguish messages between the same ranks: with two ranks, left and right are the
        # same.
        works = [
            dist.isend(own, dst=right, tag=1),
            dist.isend(own, dst=left, tag=2),
            dist.irecv(from_left, src=left, tag=1),
            dist.irecv(from_right, src=right, tag=2),
        ]
        square = rank * rank  # computation that needs no message
        for work in works:
            if work is not None:
                work.wait()  # until then, do not use the three tensors
        return (
            f"rank {rank} got {from_left.item():.0f} from the left, "
            f"{from_right.item():.0f} from the right, and computed {square}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Swap numbers with the neighbours in a ring.")
    parser.add_argument(
        "--nproc-per-node", type=int, default=4, help="ranks to start (4), at least 2"
    )
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    options = parser.parse_args()
    if options.nproc_per_node < 2:
        parser.error(
            f"--nproc-per-node {options.nproc_per_node} given, expected at least 2: a rank has no "
            "neighbour"
        )
    for line in phalanx.launch(exchange, options.nproc_per_node, (options.backend,)):
        print(line)


if __name__ == "__main__":
    main()
