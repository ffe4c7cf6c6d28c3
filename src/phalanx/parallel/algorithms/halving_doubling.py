"""Recursive halving and doubling: as few bytes as the ring, in a logarithmic number of steps."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.parallel.algorithms.peers import Peers, run_all_reduce, split_evenly

__all__ = ["halving_doubling_all_reduce", "halving_doubling_steps"]


def halving_doubling_all_reduce(
    tensor: Tensor,
    op: ReduceOp | ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    tag: int = 0,
) -> None:
    """Replace a tensor by its reduction over a group, by recursive halving and doubling.

    Halving: a rank and its partner at distance 1 each send one half of the tensor and combine the
    other half. Each rank then does the same with the half that it kept and the partner at distance
    2, then at 4, and so on, until it has a p-th of the result. Doubling: the same exchanges in
    reverse order, of finished parts. If p is not a power of two, let q be the largest power of two
    below p: ranks q, q + 1, ... first send their tensor to ranks 0, 1, ..., and receive the result
    from them at the end.

    Source: R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004. (There,
    ranks from q on send one half of their tensor and reduce the other, which takes one message more
    but less time to combine.) Use it for all sizes if p is a power of two, at least 8, each rank
    has a core, and messages to distant ranks cost no more than those to neighbours.

    Cost for p ranks and n bytes, with alpha seconds for a message, beta for a byte sent and gamma
    for a byte combined; q is the largest power of two up to p:

    - messages of a rank: 2 log2 q; bytes that it sends: 2 (q - 1) / q n; additional memory: n / 2
    - time: 2 log2 q alpha + 2 (q - 1) / q n beta + (q - 1) / q n gamma
    - p != q: ranks 0 to p - q - 1 send one message of n bytes more and need n bytes more memory;
      ranks q and above send only one message, of n bytes; time: 2 alpha + 2 n beta + n gamma more

    Order: a balanced tree, ((x0 op x1) op (x2 op x3)) op ..., the same for every element. If p is
    not a power of two, x[i] stands for x[i] op x[q+i]. One rank calculates each element and the
    others receive a copy: all ranks have the same bits, on any machines. If p is a power of two,
    the bits are those of `tree_all_reduce`.

    Arguments, blocking behaviour and errors are those of `ring_all_reduce_simple`.
    """
    run_all_reduce(halving_doubling_steps, "halving_doubling_all_reduce", tensor, op, group, tag)


def halving_doubling_steps(peers: Peers, flat: Tensor) -> None:
    """Run one rank's steps; a rank beyond the power of two takes part through a proxy rank."""
    power = 1 << (peers.size.bit_length() - 1)
    excess_rank, proxy_rank = peers.rank + power, peers.rank - power
    if proxy_rank >= 0:
        peers.send(flat, proxy_rank)
        peers.receive(flat, proxy_rank)
        return
    if excess_rank < peers.size:
        received = flat.new_empty(flat.numel())
        peers.receive(received, excess_rank)
        peers.combine(flat, received, flat)
    _halve_and_double(peers, flat, power)
    if excess_rank < peers.size:
        peers.send(flat, excess_rank)


def _halve_and_double(peers: Peers, flat: Tensor, power: int) -> None:
    buffer = flat.new_empty((flat.numel() + 1) // 2)
    kept, exchanges = flat, []
    distance = 1
    while distance < power:
        partner = peers.rank ^ distance
        lower, upper = split_evenly(kept, 2)
        kept, given = (lower, upper) if peers.rank < partner else (upper, lower)
        received = buffer[: kept.numel()]
        peers.exchange(given, partner, received, partner)
        # The lower ranks' part comes first, on both sides.
        first, second = (kept, received) if peers.rank < partner else (received, kept)
        peers.combine(first, second, kept)
        exchanges.append((kept, given, partner))
        distance *= 2
    for finished, missing, partner in reversed(exchanges):
        peers.exchange(finished, partner, missing, partner)
