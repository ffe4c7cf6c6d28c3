"""Tensors as the core takes them: contiguous, in host memory.

Everything here runs before any peer is touched, so that a mistake on one rank stays there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_log = logging.getLogger("phalanx")
_told: set[str] = set()


def only(tensors: Sequence[torch.Tensor] | torch.Tensor, what: str) -> torch.Tensor:
    """The one tensor of a list of one, or a tensor itself."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"{what}: got {len(tensors)} tensors, expected one per rank")
    return tensors[0]


def dense(tensor: torch.Tensor, what: str, *, written: bool) -> torch.Tensor:
    """The tensor itself, or a contiguous copy of it in host memory.

    Args:
        tensor: What the caller of the operation gave.
        what: The operation's name, for errors.
        written: Whether the operation writes to it: `settle` then copies back what came out.

    Raises:
        UsageError: The tensor is sparse, quantized, on a device that is neither CPU nor CUDA, or
            to be written while several of its elements share memory.
    """
    if tensor.is_cpu and tensor.layout is torch.strided:
        if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            return tensor
    else:
        _check_kind(tensor, what)
    if written and torch._debug_has_internal_overlap(tensor) == 1:
        raise UsageError(
            f"{what}: elements of the tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} share memory (expand()?): pass a tensor of its own, as from clone()"
        )
    flat = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    with torch.inference_mode():
        flat.copy_(tensor)
    return flat


def settle(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy a result back where `dense` had made a copy."""
    if flat is not tensor:
        # Neither autograd nor inference mode has a say in what a collective writes.
        with torch.inference_mode():
            tensor.copy_(flat)


def same_kind(
    tensors: Sequence[torch.Tensor],
    like: torch.Tensor,
    what: str,
    *,
    sized: Collection[int] | None = None,
) -> None:
    """Check that all tensors have the dtype and the device of `like`, and its element count.

    Args:
        tensors: The list that the caller of the operation gave.
        like: The tensor of this rank.
        what: The operation's name, for errors.
        sized: Which entries must have the element count of `like`; None for all.
    """
    dtype, device, count = like.dtype, like.device, like.numel()
    for index, tensor in enumerate(tensors):
        counts = sized is None or index in sized
        if tensor.dtype is not dtype or (counts and tensor.numel() != count):
            raise UsageError(
                f"{what}: tensor {index} of the list is {label(tensor)}, expected "
                f"{label(like) if counts else dtype} like the tensor of this rank"
            )
        if tensor.device != device:
            raise UsageError(
                f"{what}: tensor {index} of the list is on {tensor.device}, the tensor of this "
                f"rank on {device}; expected one device"
            )


def same_pair(output: torch.Tensor, source: torch.Tensor, what: str) -> None:
    """Check that an output has the dtype and the device of its input."""
    if output.dtype is not source.dtype or output.device != source.device:
        raise UsageError(
            f"{what}: the output is {label(output)} on {output.device}, the input {label(source)} "
            f"on {source.device}; expected one dtype and one device"
        )


def label(tensor: torch.Tensor) -> str:
    """A tensor in a message: "float32[3, 4]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check_kind(tensor: torch.Tensor, what: str) -> None:
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{what}: got a tensor of layout {tensor.layout}, expected a dense one: to_dense()"
        )
    if tensor.device.type == "cuda":
        tell_once("cuda", "CUDA tensors travel through host memory: expect copies")
    elif tensor.device.type != "cpu":
        raise UsageError(
            f"{what}: the tensor is on {tensor.device}, expected cpu (or cuda): move it there first"
        )


def tell_once(key: str, message: str) -> None:
    """Log that a slower path is taken, the first time."""
    if key not in _told:
        _told.add(key)
        _log.warning(message)
