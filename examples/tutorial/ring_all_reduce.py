"""All-reduce by messages in a ring: a wrong version, a correct one, and one in chunks.

phalanx run --nproc-per-node 4 ring_all_reduce.py
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx


def exchange(data: Tensor, received: Tensor) -> int:
    """Send to the right neighbour and receive from the left one; return the elements sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    work = dist.isend(data, dst=(rank + 1) % world_size)
    dist.recv(received, src=(rank - 1) % world_size)
    if work is not None:
        work.wait()
    return data.numel()


def reduce_wrongly(tensor: Tensor) -> int:
    """Pass the running sum on, which counts some ranks several times."""
    sent, received = 0, torch.empty_like(tensor)
    for _ in range(dist.get_world_size() - 1):
        sent += exchange(tensor, received)
        tensor += received
    return sent


def reduce_whole(tensor: Tensor) -> int:
    """Pass on what has just arrived, and add it: correct, but every step sends everything."""
    sent, current, received = 0, tensor.clone(), torch.empty_like(tensor)
    for _ in range(dist.get_world_size() - 1):
        sent += exchange(current, received)
        tensor += received
        current, received = received, current
    return sent


def reduce_in_chunks(tensor: Tensor) -> int:
    """Sum one chunk on each rank, then pass the sums around."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    sent = 0
    for step in range(world_size - 1):  # reduce-scatter
        ours, theirs = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        received = torch.empty_like(theirs)
        sent += exchange(ours, received)
        theirs += received
    for step in range(world_size - 1):  # all-gather
        ours, theirs = chunks[(rank - step + 1) % world_size], chunks[(rank - step) % world_size]
        sent += exchange(ours, theirs)
    return sent


def compare(name: str, reduce: Callable[[Tensor], int], size: int) -> str:
    """Return the result of an all-reduce on this rank, and the elements that it has sent."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensor = torch.randint(100, (size,), generator=generator)
    expected = tensor.clone()
    dist.all_reduce(expected)
    sent = reduce(tensor)
    verdict = "right" if torch.equal(tensor, expected) else "wrong"
    return f"{name}: {verdict}, {sent} elements sent"


if __name__ == "__main__":
    with phalanx.init(*sys.argv[1:2]) as session:
        if session.world_size == 1:
            sys.exit("a ring needs two ranks: phalanx run --nproc-per-node 4 ring_all_reduce.py")
        lines = [
            compare("running sums", reduce_wrongly, 1000),
            compare("whole tensors", reduce_whole, 1000),
            compare("chunks", reduce_in_chunks, 1000),
        ]
        if session.is_main:
            print("\n".join(lines))
