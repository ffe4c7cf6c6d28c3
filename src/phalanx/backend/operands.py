"""Operands: the core's codes for dtypes and reduction operators, and checks of tensors.

The core needs contiguous tensors in host memory. All checks run before any communication, so that a
mistake on one rank does not affect others. `empty_shared` creates tensors that peers can access.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed import ReduceOp
from torch.utils.dlpack import from_dlpack

from phalanx import _native
from phalanx.errors import PhalanxError, UsageError
from phalanx.torch_versions import has_internal_overlap, has_python_key

_log = logging.getLogger("phalanx")
_warned: set[str] = set()
_STRIDED = torch.strided
_MIN_PINNED = 64 * 2**10
"""The size in bytes from which a copy of a CUDA tensor is in memory that is not swapped out."""

has_met_wrapper = False
"""True if an operation of this process has met a wrapper (see `instrumentation`). Otherwise, no
operation need be searched for one."""

DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in _native.DTYPES.items()
}
DTYPE_NAMES: dict[int, str] = {code: name for name, code in _native.DTYPES.items()}

# The hash of an operator is its number in PyTorch, and the cheapest way to get it.
OPS: dict[int, int] = {
    hash(getattr(ReduceOp, name.upper())): code
    for name, code in _native.REDUCE_OPS.items()
    if name != "none"
}
"""The core's codes of operators, by their numbers in PyTorch."""
_SUM = hash(ReduceOp.SUM)
_AVG = hash(ReduceOp.AVG)
_PREMUL_SUM = hash(ReduceOp.PREMUL_SUM)
OP_NAMES: dict[int, str] = {code: name.upper() for name, code in _native.REDUCE_OPS.items()}


class Reduction(NamedTuple):
    """The implementation of an operator on a dtype.

    Attributes:
        dtype: The core's code of the dtype.
        op: The core's code of the operator; that of SUM for PREMUL_SUM and for AVG of integers.
        premultiplies: Whether tensors are first multiplied by a factor, as PREMUL_SUM requires.
        divides: Whether the result is divided by the world size, rounded towards zero. This is so
            for AVG of integers, as on NCCL.
    """

    dtype: int
    op: int
    premultiplies: bool = False
    divides: bool = False


# Precomputed, so that an operation needs a single look-up; even this is a tenth of its total cost.
_REDUCTIONS: dict[tuple[torch.dtype, int], Reduction] = {
    (dtype, number): Reduction(code, op)
    for dtype, code in DTYPE_CODES.items()
    for number, op in OPS.items()
    if _native.supports(code, op)
}
_REDUCTIONS.update(
    ((dtype, _PREMUL_SUM), Reduction(code, OPS[_SUM], premultiplies=True))
    for dtype, code in DTYPE_CODES.items()
    if dtype.is_floating_point or dtype.is_complex
)
_REDUCTIONS.update(
    ((dtype, _AVG), Reduction(DTYPE_CODES[dtype], OPS[_SUM], divides=True))
    # PyTorch cannot divide larger unsigned integers.
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
)


def dtype_code(dtype: torch.dtype, operation: str) -> int:
    """Return the core's code of a dtype; the error names the `operation`."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        supported = ", ".join(_native.DTYPES)
        raise UsageError(f"{operation}: {dtype} is not supported; expected one of: {supported}")
    return code


def find_reduction(op: ReduceOp, tensor: torch.Tensor, operation: str) -> Reduction:
    """Return the reduction of a tensor by an operator; errors name the `operation`."""
    number, dtype = hash(op), tensor.dtype
    reduction = _REDUCTIONS.get((dtype, number))
    if reduction is not None:
        return reduction
    code = dtype_code(dtype, operation)
    if number == _PREMUL_SUM:
        raise UsageError(f"{operation}: PREMUL_SUM needs floats, got {format_tensor(tensor)}")
    if number not in OPS:
        raise UsageError(f"{operation}: unknown reduction {op}")
    possible = [OP_NAMES[o] for n, o in OPS.items() if (dtype, n) in _REDUCTIONS]
    raise UsageError(
        f"{operation}: {OP_NAMES[OPS[number]]} has no meaning for {DTYPE_NAMES[code]}; "
        f"expected one of: {', '.join(possible)}"
    )


def premultiply(flat: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return a contiguous tensor multiplied by the factor of a PREMUL_SUM."""
    state: Any = op.__getstate__()
    factor: float | torch.Tensor = state[1]
    # Never in place, since `flat` may be the user's tensor, which keeps its values if it is not the
    # result.
    return flat * (factor.to("cpu") if isinstance(factor, torch.Tensor) else factor)


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
        UsageError: The tensor is sparse, quantized, or on a device that is neither CPU nor CUDA, or
            its memory was freed.
    """
    is_usable = tensor.is_cpu and tensor.layout is _STRIDED
    if not is_usable:
        _check_layout_and_device(tensor, operation)
    if tensor.data_ptr() == 0 and tensor.numel():
        _check_is_wrapper(tensor, operation)
    if is_usable and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    # A copy from a GPU to memory that may be swapped out takes up to four times as long.
    is_pinned = tensor.is_cuda and tensor.nbytes >= _MIN_PINNED
    flat = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
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
    if flat is not tensor and has_internal_overlap(tensor):
        raise UsageError(
            f"{operation}: elements of the tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} share memory (expand()?): pass a tensor of its own, as from clone()"
        )
    return flat


def copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy a result back to the user's tensor if `prepare_output` had made a copy.

    Also tells autograd that the tensor was changed.
    """
    if flat is not tensor:
        # Collectives write to any tensor, regardless of autograd and inference mode.
        with torch.inference_mode():
            tensor.copy_(flat)
    increment_version(tensor)


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
    dtype, on_cpu, count = reference.dtype, reference.is_cpu, reference.numel()
    for index, tensor in enumerate(tensors):
        checks_count = sized_indices is None or index in sized_indices
        if tensor.dtype is not dtype or (checks_count and tensor.numel() != count):
            raise UsageError(
                f"{operation}: tensor {index} of the list is {format_tensor(tensor)}, expected "
                f"{format_tensor(reference) if checks_count else dtype} like the tensor of this "
                "rank"
            )
        # Faster than a comparison of devices.
        if not (on_cpu and tensor.is_cpu) and tensor.device != reference.device:
            raise UsageError(
                f"{operation}: tensor {index} of the list is on {tensor.device}, the tensor of "
                f"this rank on {reference.device}; expected one device"
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


def _check_is_wrapper(tensor: torch.Tensor, operation: str) -> None:
    """Reject a tensor whose memory was freed; a wrapper never had any (see `instrumentation`)."""
    if not has_python_key(tensor):
        raise UsageError(
            f"{operation}: the memory of the tensor, {format_tensor(tensor)}, was freed "
            "(untyped_storage().resize_(0)): allocate it again first"
        )
    global has_met_wrapper  # noqa: PLW0603
    has_met_wrapper = True


def warn_once(key: str, message: str) -> None:
    """Log a warning, for example of a slower path, once per key in this process."""
    if key not in _warned:
        _warned.add(key)
        _log.warning(message)


def empty_shared(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Create a tensor with which collectives of Phalanx skip the copies through the segment.

    Use it for data that is communicated repeatedly, such as gradient buckets; large operations then
    run at about the speed of memory. In all other respects, the tensor and its views are ordinary
    CPU tensors, except that their storage cannot be resized (`resize_`), like that of a tensor from
    `torch.from_numpy`. Collectives take the fast path if the tensors of all ranks that provide data
    (for a broadcast, only the root) are in such memory, and stage them through the segment
    otherwise. This works with any group, and no other rank has to call this function.

    The memory belongs to this process. It is allocated at once, and freed when the tensor and its
    views are gone. What a forked child writes to it is seen by nobody else. Pages that the child
    has not written have what its parent writes, and zeros once the parent has freed the tensor: a
    `clone()` in the child is independent of that.

    Args:
        size: Shape, as for `torch.empty`: several integers or one sequence.
        dtype: The dtype; default `torch.get_default_dtype()`.

    Returns:
        A contiguous, page-aligned tensor with undefined values.

    Raises:
        UsageError: A size is negative.
        PhalanxError: Not enough memory.

    Example:
        >>> bucket = phalanx.empty_shared(25_000_000)
        >>> dist.all_reduce(bucket)
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    dtype = dtype or torch.get_default_dtype()
    if any(extent < 0 for extent in shape):
        raise UsageError(f"empty_shared: got the shape {list(shape)}, expected no negative size")
    count = prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    needed = count * dtype.itemsize
    try:
        memory = _native.allocate_shared(needed)
    except OSError as error:
        raise PhalanxError(
            f"empty_shared: no shared memory for {dtype}{list(shape)}, {needed} bytes "
            f"({error.strerror}): free memory, or use torch.empty"
        ) from None
    return from_dlpack(memory).view(dtype).view(shape)
