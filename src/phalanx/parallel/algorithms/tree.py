"""The binomial tree: up to rank 0, and down again."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.parallel.algorithms.peers import Peers, all_reduce_by

__all__ = ["tree_all_reduce", "tree_steps"]


def tree_all_reduce(
    tensor: Tensor,
    op: ReduceOp | ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    tag: int = 0,
) -> None:
    """Replace a tensor by its reduction over a group: reduced to rank 0, then broadcast.

    Reduce: ranks 1, 3, 5, ... give their tensor to the rank below, which combines; of the ranks
    that are left every second one gives its to the one before it, and so on, until rank 0 has it
    all. Broadcast: the same way backwards. It is the binomial tree of most MPI libraries' reduce
    and broadcast (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
    Operations in MPICH", 2005).

    It sends the fewest messages of all, 2 (p - 1) together, each of them the whole tensor, and many
    ranks only wait: good for small tensors where ranks share cores or a link, never for large ones.

    Cost for p ranks and n bytes, with alpha seconds for a message, beta for a byte sent and gamma
    for a byte combined; d = log2 p, rounded up:

    - messages: rank 0 sends and receives d, a leaf (every odd rank) 1; bytes that a rank sends: n
      for each; additional memory: n
    - time: 2 d (alpha + n beta) + d n gamma

    Order: a binomial tree, ((x0 op x1) op (x2 op x3)) op ..., the same for every element. Only rank
    0 has the result calculated, and the others get a copy: all ranks have the same bits, whatever
    machines they run on. If p is a power of two they are those of `halving_doubling_all_reduce`.

    Arguments, blocking behaviour and errors are those of `ring_all_reduce_simple`.
    """
    all_reduce_by(tree_steps, "tree_all_reduce", tensor, op, group, tag)


def tree_steps(peers: Peers, flat: Tensor) -> None:
    """Up to rank 0, and down again; `distance` is how far away the rank above is."""
    distance = _reduce(peers, flat)
    if peers.rank:
        peers.receive(flat, peers.rank - distance)
    while distance > 1:
        distance //= 2
        if peers.rank + distance < peers.size:
            peers.send(flat, peers.rank + distance)


def _reduce(peers: Peers, flat: Tensor) -> int:
    """Combine what the ranks below have, and give it to the one above: how far away that is."""
    spare = flat.new_empty(0)
    distance = 1
    while distance < peers.size:
        if peers.rank & distance:
            peers.send(flat, peers.rank - distance)
            break
        if peers.rank + distance < peers.size:
            if not spare.numel():
                spare = flat.new_empty(flat.numel())
            peers.receive(spare, peers.rank + distance)
            peers.combine(flat, spare, flat)
        distance *= 2
    return distance
