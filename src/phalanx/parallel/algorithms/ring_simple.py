"""The plain ring: everybody's whole tensor passes by everybody."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.parallel.algorithms.peers import Peers, all_reduce_by

__all__ = ["ring_all_reduce_simple", "ring_simple_steps"]


def ring_all_reduce_simple(
    tensor: Tensor,
    op: ReduceOp | ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    tag: int = 0,
) -> None:
    """Replace a tensor by its reduction over a group; whole tensors go round a ring.

    In each of p - 1 steps a rank passes the tensor that it got last to the next rank, its own one
    first. Then it has all p of them, and combines them by itself. It is the all-reduce that one
    writes first. On 2 and 3 ranks no other of these has fewer steps, so that small tensors are
    fastest this way.

    Cost for p ranks and n bytes, with alpha seconds for a message, beta for a byte sent and gamma
    for a byte combined:

    - messages of a rank: p - 1; bytes that it sends: (p - 1) n; additional memory: p n
    - time: (p - 1) (alpha + n beta + n gamma)

    Order: ((x0 op x1) op x2) op ..., in rank order for every element. Each rank does the whole
    calculation, the same one on the same bits in the same order, so on machines that calculate
    alike all ranks get the same bits.

    All ranks of the group must call it with the same shape, dtype, `op` and `tag`. It blocks until
    this rank's result is there; each of its messages waits at most for the group's timeout.

    Args:
        tensor: Any shape; changed in place. Bool, integers of 8 to 64 bits, with a sign or
            without, float16, bfloat16, float32, float64, complex64, complex128. What isn't
            contiguous is copied. Half precision is rounded at each combining.
        op: SUM, PRODUCT; MIN and MAX but for complex numbers (NaN wins); AVG for floats and
            complex numbers: the sum, divided by p at the end; BAND, BOR, BXOR for integers.
        group: The default group if None.
        tag: Of every message, 0 to 2^31 - 1. Messages of your own that are on their way between
            the same ranks need another one. (NCCL has no tags.)

    Raises:
        UsageError: An argument is wrong: no dense tensor, elements that share memory, an operator
            or dtype that isn't in the lists above, no process group, not a member of it, a bad tag.
            No message was sent.
        torch.distributed.DistBackendError: The backend failed: a rank died or didn't come. The
            tensor holds anything then. (Gloo raises RuntimeError.)
    """
    all_reduce_by(ring_simple_steps, "ring_all_reduce_simple", tensor, op, group, tag)


def ring_simple_steps(peers: Peers, flat: Tensor) -> None:
    """Pass on what came last, and combine all in rank order."""
    following, previous = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    held = flat.new_empty(peers.size, flat.numel())
    held[peers.rank] = flat
    for step in range(peers.size - 1):
        passed_on = held[(peers.rank - step) % peers.size]
        arriving = held[(peers.rank - step - 1) % peers.size]
        peers.exchange(passed_on, following, arriving, previous)
    flat.copy_(held[0])
    for other in held[1:]:
        peers.combine(flat, other, flat)
