"""The simple ring: each rank's whole tensor passes through all ranks."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.parallel.algorithms.peers import Peers, run_all_reduce

__all__ = ["ring_all_reduce_simple", "ring_simple_steps"]


def ring_all_reduce_simple(
    tensor: Tensor,
    op: ReduceOp | ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    tag: int = 0,
) -> None:
    """Replace a tensor by its reduction over a group, by passing whole tensors around a ring.

    In each of p - 1 steps a rank sends the tensor that it received last to the next rank, beginning
    with its own. It then has all p tensors and combines them itself. It is the simplest all-reduce.
    On 2 and 3 ranks no other algorithm here has fewer steps, so it is the fastest for small
    tensors.

    Cost for p ranks and n bytes, with alpha seconds for a message, beta for a byte sent and gamma
    for a byte combined:

    - messages of a rank: p - 1; bytes that it sends: (p - 1) n; additional memory: p n
    - time: (p - 1) (alpha + n beta + n gamma)

    Order: ((x0 op x1) op x2) op ..., in rank order for every element. Each rank does the whole
    calculation on the same bits in the same order, so on machines with the same arithmetic all
    ranks get the same bits.

    All ranks of the group must call it with the same shape, dtype, `op` and `tag`. It blocks until
    this rank has its result; each of its messages waits at most for the group's timeout.

    Args:
        tensor: A tensor of any shape, changed in place. Bool, signed and unsigned integers of 8 to
            64 bits, float16, bfloat16, float32, float64, complex64, complex128. A non-contiguous
            tensor is copied. Half precision is rounded after each combination.
        op: SUM, PRODUCT; MIN and MAX except for complex numbers (NaN propagates); AVG for floats
            and complex numbers: the sum, divided by p at the end; BAND, BOR, BXOR for integers.
        group: The group to reduce over; the default group if None.
        tag: The tag of every message, 0 to 2^31 - 1. The caller's own messages in flight between
            the same ranks need a different tag. (NCCL has no tags.)

    Raises:
        UsageError: An argument is invalid: the tensor is not dense, its elements share memory, the
            operator or dtype is not listed above, there is no process group, this rank is not a
            member of it, or the tag is out of range. No message was sent.
        torch.distributed.DistBackendError: The backend failed: a rank died or did not take part.
            The content of the tensor is then undefined. (Gloo raises RuntimeError.)
    """
    run_all_reduce(ring_simple_steps, "ring_all_reduce_simple", tensor, op, group, tag)


def ring_simple_steps(peers: Peers, flat: Tensor) -> None:
    """Run one rank's steps: gather all tensors around the ring, then combine them in rank order."""
    next_rank, previous_rank = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    tensors = flat.new_empty(peers.size, flat.numel())
    tensors[peers.rank] = flat
    for step in range(peers.size - 1):
        outgoing = tensors[(peers.rank - step) % peers.size]
        received = tensors[(peers.rank - step - 1) % peers.size]
        peers.exchange(outgoing, next_rank, received, previous_rank)
    flat.copy_(tensors[0])
    for other in tensors[1:]:
        peers.combine(flat, other, flat)
