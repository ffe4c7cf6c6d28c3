"""The binomial tree: a reduction to rank 0, then a broadcast."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.parallel.algorithms.peers import Peers, run_all_reduce

__all__ = ["tree_all_reduce", "tree_steps"]


def tree_all_reduce(
    tensor: Tensor,
    op: ReduceOp | ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    tag: int = 0,
) -> None:
    """Replace a tensor by its reduction over a group: reduced to rank 0, then broadcast.

    Reduce: ranks 1, 3, 5, ... send their tensor to the rank below, which combines. Of the remaining
    ranks, every second one sends its tensor to the one before it, and so on, until rank 0 has the
    result. Broadcast: the same messages in reverse. It is the binomial tree of most MPI libraries'
    reduce and broadcast (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", 2005).

    It sends the fewest messages of all algorithms, 2 (p - 1) in total, but each has the whole
    tensor, and many ranks only wait. Use it for small tensors if ranks share cores or a link, never
    for large ones.

    Cost for p ranks and n bytes, with alpha seconds for a message, beta for a byte sent and gamma
    for a byte combined; d = log2 p, rounded up:

    - messages: rank 0 sends and receives d, a leaf (every odd rank) 1; bytes that a rank sends: n
      for each message; additional memory: n
    - time: 2 d (alpha + n beta) + d n gamma

    Order: a binomial tree, ((x0 op x1) op (x2 op x3)) op ..., the same for every element. Only rank
    0 calculates the result, and the others receive a copy: all ranks have the same bits, on any
    machines. If p is a power of two, the bits are those of `halving_doubling_all_reduce`.

    Arguments, blocking behaviour and errors are those of `ring_all_reduce_simple`.
    """
    run_all_reduce(tree_steps, "tree_all_reduce", tensor, op, group, tag)


def tree_steps(peers: Peers, flat: Tensor) -> None:
    """Run one rank's steps: reduce to rank 0, then broadcast back along the same tree."""
    distance = _reduce(peers, flat)
    if peers.rank:
        peers.receive(flat, peers.rank - distance)
    while distance > 1:
        distance //= 2
        if peers.rank + distance < peers.size:
            peers.send(flat, peers.rank + distance)


def _reduce(peers: Peers, flat: Tensor) -> int:
    """Combine the children's tensors and send the result to the parent.

    Returns:
        The distance to the parent; on rank 0, the first power of two that is at least the size.
    """
    buffer = flat.new_empty(0)
    distance = 1
    while distance < peers.size:
        if peers.rank & distance:
            peers.send(flat, peers.rank - distance)
            break
        if peers.rank + distance < peers.size:
            if not buffer.numel():
                buffer = flat.new_empty(flat.numel())
            peers.receive(buffer, peers.rank + distance)
            peers.combine(flat, buffer, flat)
        distance *= 2
    return distance
