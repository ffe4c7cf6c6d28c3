"""All-reduce by point-to-point messages: four classic algorithms, for any backend with send.

Each algorithm is a public function and the steps of one rank. The steps consist of the methods of
`Peers`: send, receive, exchange and combine. `_run_all_reduce` checks the arguments before any
message, and passes the steps one flat, contiguous tensor. The page "All-reduce
algorithms" of the documentation draws the steps and measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.errors import UsageError
from phalanx.parallel.gradients import check_group

_MAX_TAG = 2**31 - 1

Combine = Callable[[Tensor, Tensor, Tensor], object]
"""A function that combines the first tensor with the second into the third, which may be either."""

_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex64, torch.complex128}

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AVG": torch.add,  # divided at the end
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Peers:
    """The other ranks of a group, for one all-reduce; ranks are numbered as in the group.

    Every method blocks until its tensors may be reused, at most for the group's timeout. No message
    is sent for an empty tensor, since both sides know its size.

    Attributes:
        rank: This process's rank in the group.
        size: The number of ranks in the group.
        combine: The function that combines its first tensor with its second into its third.
    """

    def __init__(self, group: dist.ProcessGroup | None, tag: int, combine: Combine) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.combine = combine
        self._group, self._tag = group, tag

    def send(self, outgoing: Tensor, to: int) -> None:
        """Send a tensor to a rank."""
        if outgoing.numel():
            dist.send(outgoing, group=self._group, tag=self._tag, group_dst=to)

    def receive(self, incoming: Tensor, source: int) -> None:
        """Receive a tensor from a rank."""
        if incoming.numel():
            dist.recv(incoming, group=self._group, tag=self._tag, group_src=source)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        """Send one tensor and receive another concurrently.

        If all ranks of a ring sent first and received afterwards, they could deadlock.
        """
        calls = [(dist.irecv, incoming, source), (dist.isend, outgoing, to)]
        # Batched, because NCCL, which executes operations in stream order, must group the two;
        # other backends simply post them.
        messages = [
            dist.P2POp(call, tensor, group=self._group, tag=self._tag, group_peer=peer)
            for call, tensor, peer in calls
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()


Steps = Callable[[Peers, Tensor], None]
"""The steps of one rank, which replace its flat tensor by the reduction of all ranks' tensors."""


def _split_evenly(flat: Tensor, count: int) -> list[Tensor]:
    """Return views of a flat tensor split into `count` parts, whose sizes differ by at most one.

    If there are fewer elements than parts, some parts are empty.
    """
    bounds = [index * flat.numel() // count for index in range(count + 1)]
    return [flat[start:end] for start, end in pairwise(bounds)]


# A collective may write to any tensor, even one that requires a gradient or is an inference tensor.
@torch.inference_mode()
def _run_all_reduce(
    steps: Steps,
    caller: str,
    tensor: Tensor,
    op: object,
    group: dist.ProcessGroup | None,
    tag: object,
) -> None:
    """Check the arguments, run the steps on a flat tensor, and leave the result in `tensor`.

    Args:
        steps: The steps of the algorithm.
        caller: The name of the algorithm, for errors.
        tensor: The caller's tensor, which is reduced in place.
        op: The operator.
        group: The group; the default group if None.
        tag: The tag of all messages.

    Raises:
        UsageError: An argument is invalid; no message was sent.
    """
    _check_tensor(tensor, caller)
    name, combine = _resolve_operator(op, tensor.dtype, caller)
    check_group(group, caller)
    if not isinstance(tag, int) or not 0 <= tag <= _MAX_TAG:
        raise UsageError(f"{caller}: tag {tag!r} given, expected 0 to {_MAX_TAG}")
    peers = Peers(group, tag, combine)
    if peers.size == 1 or tensor.numel() == 0:
        return
    # The bits of a conjugated view are not its values, and only a contiguous tensor can be cut.
    packed = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = packed.view(-1)
    steps(peers, flat)
    if name == "AVG":
        flat /= peers.size
    if packed.data_ptr() != tensor.data_ptr():
        tensor.copy_(packed)


def _check_tensor(tensor: object, caller: str) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{caller}: {type(tensor).__name__} given, expected a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{caller}: a tensor of layout {tensor.layout} given, expected a dense one: to_dense()"
        )
    if any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UsageError(
            f"{caller}: elements of the tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} share memory (expand()?): pass a separate tensor, such as a clone()"
        )


def _resolve_operator(op: object, dtype: torch.dtype, caller: str) -> tuple[str, Combine]:
    """Return the operator's name and the function that combines two tensors of a dtype.

    Args:
        op: An operator of `torch.distributed.ReduceOp`.
        dtype: The dtype of the tensors.
        caller: The name of the calling function, for errors.

    Raises:
        UsageError: `op` is not an operator or has no meaning for the dtype, or the dtype is not
            supported.
    """
    supported = _supported_operators(dtype)
    if not supported:
        known = ", ".join(sorted(map(_label, _INTEGERS | _FLOATS | _COMPLEX)))
        raise UsageError(f"{caller}: {_label(dtype)} is not supported; expected one of: {known}")
    if not isinstance(op, ReduceOp | ReduceOp.RedOpType):
        raise UsageError(
            f"{caller}: op {op!r} given, expected a torch.distributed.ReduceOp; a group is given "
            "as group=..."
        )
    operators = ReduceOp.RedOpType.__members__
    given = next((name for name, operator in operators.items() if op == operator), str(op))
    if given in supported:
        return given, _function(given, dtype)
    raise UsageError(
        f"{caller}: {given} has no meaning for {_label(dtype)} here; expected one of: "
        f"{', '.join(supported)}"
    )


def _supported_operators(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype in _COMPLEX:
        return ("SUM", "PRODUCT", "AVG")
    if dtype in _FLOATS:
        return ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
    if dtype in _INTEGERS:
        return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return ()


def _function(name: str, dtype: torch.dtype) -> Combine:
    function = _FUNCTIONS[name]

    def combine(first: Tensor, second: Tensor, output: Tensor) -> None:
        function(first, second, out=output)

    if dtype not in _SIGNED:
        return combine
    signed = _SIGNED[dtype]
    lowest = torch.iinfo(signed).min

    # PyTorch has no arithmetic on wide unsigned integers. Except for the order, signed arithmetic
    # gives the same bits.
    def combine_signed(first: Tensor, second: Tensor, output: Tensor) -> None:
        function(first.view(signed), second.view(signed), out=output.view(signed))

    # Flipping the highest bit maps the unsigned order to the signed order.
    def compare_unsigned(first: Tensor, second: Tensor, output: Tensor) -> None:
        chosen = function(first.view(signed) ^ lowest, second.view(signed) ^ lowest)
        torch.bitwise_xor(chosen, lowest, out=output.view(signed))

    return compare_unsigned if name in ("MIN", "MAX") else combine_signed


def _label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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

    Example:
        >>> def work():
        ...     with phalanx.init() as session:
        ...         tensor = torch.full((3,), float(session.rank))
        ...         ring_all_reduce_simple(tensor)
        ...         return tensor.tolist()
        >>> phalanx.launch(work, 4)[0]
        [6.0, 6.0, 6.0]
    """
    _run_all_reduce(ring_simple_steps, "ring_all_reduce_simple", tensor, op, group, tag)


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


def ring_all_reduce(
    tensor: Tensor,
    op: ReduceOp | ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    tag: int = 0,
) -> None:
    """Replace a tensor by its reduction over a group, slice by slice around a ring.

    The tensor is cut into p slices. Reduce-scatter: each slice goes around the ring once, and every
    rank combines it with its own part, so that at the end rank r has slice r of the result.
    All-gather: the finished slices go around once more. All links are busy all the time.

    Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69 (2009). They show that 2 (p - 1) / p n bytes for
    each rank are optimal. Use it for large tensors; with many ranks its 2 (p - 1) steps are too
    many for small tensors.

    Cost for p ranks and n bytes, with alpha seconds for a message, beta for a byte sent and gamma
    for a byte combined:

    - messages of a rank: 2 (p - 1); bytes that it sends: 2 (p - 1) / p n; additional memory: n / p
    - time: 2 (p - 1) alpha + 2 (p - 1) / p n beta + (p - 1) / p n gamma

    Order: slice r is ((x[r+1] op x[r+2]) op ...) op x[r], ranks counted modulo p, so it depends on
    the position of an element in the tensor. Each slice is calculated only once, and the other
    ranks receive a copy: all ranks have the same bits, on any machines.

    Arguments, blocking behaviour and errors are those of `ring_all_reduce_simple`. If there are
    fewer elements than ranks, some slices are empty, and no message is sent for them.

    Example:
        >>> ring_all_reduce(gradient, dist.ReduceOp.AVG)
    """
    _run_all_reduce(ring_steps, "ring_all_reduce", tensor, op, group, tag)


def ring_steps(peers: Peers, flat: Tensor) -> None:
    """Run one rank's steps: reduce-scatter, then all-gather."""
    next_rank, previous_rank = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    parts = _split_evenly(flat, peers.size)
    buffer = flat.new_empty(max(part.numel() for part in parts))
    for step in range(peers.size - 1):
        outgoing = parts[(peers.rank - step - 1) % peers.size]
        own = parts[(peers.rank - step - 2) % peers.size]
        received = buffer[: own.numel()]
        peers.exchange(outgoing, next_rank, received, previous_rank)
        peers.combine(received, own, own)
    for step in range(peers.size - 1):
        outgoing = parts[(peers.rank - step) % peers.size]
        received = parts[(peers.rank - step - 1) % peers.size]
        peers.exchange(outgoing, next_rank, received, previous_rank)


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

    Example:
        >>> halving_doubling_all_reduce(gradient, dist.ReduceOp.AVG)
    """
    _run_all_reduce(halving_doubling_steps, "halving_doubling_all_reduce", tensor, op, group, tag)


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
        lower, upper = _split_evenly(kept, 2)
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

    Example:
        >>> tree_all_reduce(largest, dist.ReduceOp.MAX)
    """
    _run_all_reduce(tree_steps, "tree_all_reduce", tensor, op, group, tag)


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


ALGORITHMS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        ring_all_reduce_simple,
        ring_all_reduce,
        halving_doubling_all_reduce,
        tree_all_reduce,
    )
}
"""The algorithms by name, the simplest first."""
