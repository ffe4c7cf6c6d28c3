"""All-reduce in subgroups: one sum over the even ranks, and one over the odd ranks.

python examples/subgroup_all_reduce.py
"""

import argparse

import torch
import torch.distributed as dist

import phalanx


def sum_in_subgroup(backend: str) -> str:
    """Run on every rank: return the sum of this rank's subgroup."""
    with phalanx.init(backend) as session:
        rank = session.rank
        # Every rank creates every group, in the same order, even if it is not a member.
        members = [list(range(first, session.world_size, 2)) for first in (0, 1)]
        groups = [dist.new_group(ranks) for ranks in members]
        tensor = torch.tensor([10.0**rank])
        dist.all_reduce(tensor, group=groups[rank % 2])
        return f"rank {rank} in {members[rank % 2]}: {tensor.item():.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="All-reduce in two subgroups.")
    parser.add_argument(
        "--nproc-per-node", type=int, default=4, help="ranks to start (4), at least 2"
    )
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    options = parser.parse_args()
    if options.nproc_per_node < 2:
        parser.error(
            f"--nproc-per-node {options.nproc_per_node} given, expected at least 2: there are two "
            "groups"
        )
    for line in phalanx.launch(sum_in_subgroup, options.nproc_per_node, (options.backend,)):
        print(line)


if __name__ == "__main__":
    main()
