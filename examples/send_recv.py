"""Blocking messages: a tensor is passed from rank to rank, and each rank adds 1 to it.

python examples/send_recv.py
"""

import argparse

import torch
import torch.distributed as dist

import phalanx


def pass_tensor(backend: str) -> str:
    """Run on every rank: receive from the previous rank, send to the next."""
    with phalanx.init(backend) as session:
        rank, last = session.rank, session.world_size - 1
        tensor = torch.zeros(3)
        if rank > 0:
            dist.recv(tensor, src=rank - 1)  # returns once the message has arrived
            tensor += 1
        if rank < last:
            dist.send(tensor, dst=rank + 1)  # returns once `tensor` may be changed
        return f"rank {rank} has {tensor.tolist()}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Pass a tensor from rank to rank.")
    parser.add_argument("--nproc-per-node", type=int, default=4, help="ranks to start (4)")
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx")
    options = parser.parse_args()
    if options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node {options.nproc_per_node} given, expected at least 1")
    for line in phalanx.launch(pass_tensor, options.nproc_per_node, (options.backend,)):
        print(line)


if __name__ == "__main__":
    main()
