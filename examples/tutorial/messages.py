"""Send tensors from rank to rank, with blocking and with non-blocking messages.

phalanx run --nproc-per-node 2 messages.py
"""

import sys

import torch
import torch.distributed as dist

import phalanx


def send_blocking(rank: int) -> None:
    """Send a tensor from rank 0 to rank 1; both calls return once the tensor may be used."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    print(f"blocking: rank {rank} has {tensor.item():g}")


def send_nonblocking(rank: int) -> None:
    """Do the same, and compute while the message is under way."""
    tensor = torch.zeros(1)
    work = None
    if rank == 0:
        tensor += 1
        work = dist.isend(tensor, dst=1)
        # Rule 1: do not change `tensor` before `wait` returns.
    elif rank == 1:
        work = dist.irecv(tensor, src=0)
        # Rule 2: do not read `tensor` before `wait` returns.
    squares = sum(number * number for number in range(10))
    if work is not None:
        work.wait()
    print(f"non-blocking: rank {rank} has {tensor.item():g}, and computed {squares}")


def swap(rank: int, world_size: int) -> None:
    """Send a tensor around a ring: every rank sends and receives at the same time."""
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    mine, received = torch.tensor([float(rank)]), torch.empty(1)
    work = dist.isend(mine, dst=right)
    dist.recv(received, src=left)
    if work is not None:
        work.wait()
    print(f"ring: rank {rank} got {received.item():g} from rank {left}")


if __name__ == "__main__":
    with phalanx.init(*sys.argv[1:2]) as session:
        if session.world_size == 1:
            sys.exit("a message needs two ranks: phalanx run --nproc-per-node 2 messages.py")
        send_blocking(session.rank)
        send_nonblocking(session.rank)
        swap(session.rank, session.world_size)
