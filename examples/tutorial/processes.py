"""Start several processes, and let each find its place among them.

phalanx run --nproc-per-node 4 processes.py
"""

import sys

import phalanx


def introduce(backend: str = "phalanx") -> str:
    """Run on every rank; return a sentence about this rank."""
    with phalanx.init(backend) as session:
        return f"I am rank {session.rank} of {session.world_size}"


if __name__ == "__main__":
    print(introduce(*sys.argv[1:2]))
