"""The primitives of the all-reduce algorithms: messages between ranks, and combining two tensors.

The algorithms share `run_all_reduce`, which checks the arguments before any message and passes the
steps one flat, contiguous tensor.
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

__all__ = ["Peers", "Steps", "run_all_reduce", "split_evenly"]

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


def split_evenly(flat: Tensor, count: int) -> list[Tensor]:
    """Return views of a flat tensor split into `count` parts, whose sizes differ by at most one.

    If there are fewer elements than parts, some parts are empty.
    """
    bounds = [index * flat.numel() // count for index in range(count + 1)]
    return [flat[start:end] for start, end in pairwise(bounds)]


# A collective may write to any tensor, even one that requires a gradient or is an inference tensor.
@torch.inference_mode()
def run_all_reduce(
    steps: Steps,
    caller: str,
    tensor: Tensor,
    op: object,
    group: dist.ProcessGroup | None,
    tag: int,
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
    name, combine = resolve_operator(op, tensor.dtype, caller)
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


def resolve_operator(op: object, dtype: torch.dtype, caller: str) -> tuple[str, Combine]:
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
