"""Checks of tensors, and their conversion to contiguous tensors in host memory for the core.

All checks run before any communication, so that a mistake on one rank does not affect others.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_log = logging.getLogger("phalanx")
_warned: set[str] = set()
_STRIDED = torch.strided


def single_tensor(tensors: Sequence[torch.Tensor] | torch.Tensor, operation: str) -> torch.Tensor:
    """Return the only tensor of a list, or a tensor itself."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"{operation}: got {len(tensors)} tensors, expected one per rank")
    return tensors[0]


def prepare_input(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """Return the tensor itself if the core can use it, else a contiguous copy in host memory.

    Args:
        tensor: The tensor that the caller of the operation gave.
        operation: The name of the operation, for errors.

    Raises:
        UsageError: The tensor is sparse, quantized, or on a device that is neither CPU nor CUDA.
    """
    if tensor.is_cpu and tensor.layout is _STRIDED:
        if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            return tensor
    else:
        _check_layout_and_device(tensor, operation)
    flat = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    with torch.inference_mode():
        flat.copy_(tensor)
    return flat


def prepare_output(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """Return the result of `prepare_input` for a tensor to which the operation writes.

    After the operation, `copy_back` copies the result back.

    Raises:
        UsageError: As for `prepare_input`, or several elements of the tensor share memory.
    """
    flat = prepare_input(tensor, operation)
    if flat is not tensor and torch._debug_has_internal_overlap(tensor) == 1:
        raise UsageError(
            f"{operation}: elements of the tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} share memory (expand()?): pass a tensor of its own, as from clone()"
        )
    return flat


def copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy a result back to the user's tensor if `prepare_output` had made a copy."""
    if flat is not tensor:
        # Collectives write to any tensor, regardless of autograd and inference mode.
        with torch.inference_mode():
            tensor.copy_(flat)


def check_same_kind(
    tensors: Sequence[torch.Tensor],
    reference: torch.Tensor,
    operation: str,
    *,
    sized_indices: Collection[int] | None = None,
) -> None:
    """Check that all tensors have the dtype and the device of `reference`, and its element count.

    Args:
        tensors: The list that the caller of the operation gave.
        reference: The tensor of this rank.
        operation: The name of the operation, for errors.
        sized_indices: Indices of the tensors that must have the element count of `reference`; None
            for all.
    """
    dtype, device, on_cpu, count = (
        reference.dtype,
        reference.device,
        reference.is_cpu,
        reference.numel(),
    )
    for index, tensor in enumerate(tensors):
        checks_count = sized_indices is None or index in sized_indices
        if tensor.dtype is not dtype or (checks_count and tensor.numel() != count):
            raise UsageError(
                f"{operation}: tensor {index} of the list is {format_tensor(tensor)}, expected "
                f"{format_tensor(reference) if checks_count else dtype} like the tensor of this "
                "rank"
            )
        if not (on_cpu and tensor.is_cpu) and tensor.device != device:
            raise UsageError(
                f"{operation}: tensor {index} of the list is on {tensor.device}, the tensor of "
                f"this rank on {device}; expected one device"
            )


def check_pair(output: torch.Tensor, source: torch.Tensor, operation: str) -> None:
    """Check that an output has the dtype and the device of its input."""
    is_on_cpu = output.is_cpu and source.is_cpu  # faster than a comparison of devices
    if output.dtype is not source.dtype or not (is_on_cpu or output.device == source.device):
        raise UsageError(
            f"{operation}: the output is {format_tensor(output)} on {output.device}, the input "
            f"{format_tensor(source)} on {source.device}; expected one dtype and one device"
        )


def format_tensor(tensor: torch.Tensor) -> str:
    """Format a tensor for a message, as in "float32[3, 4]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check_layout_and_device(tensor: torch.Tensor, operation: str) -> None:
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{operation}: got a tensor of layout {tensor.layout}, expected a dense one: to_dense()"
        )
    if tensor.device.type == "cuda":
        warn_once("cuda", "CUDA tensors travel through host memory: expect copies")
    elif tensor.device.type != "cpu":
        raise UsageError(
            f"{operation}: the tensor is on {tensor.device}, expected cpu (or cuda): move it there "
            "first"
        )


def warn_once(key: str, message: str) -> None:
    """Log a warning, for example of a slower path, once per key in this process."""
    if key not in _warned:
        _warned.add(key)
        _log.warning(message)
