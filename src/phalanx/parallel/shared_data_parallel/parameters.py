"""The move of a model's parameters into memory that the ranks of a host share."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel.layout import Layout
from phalanx.parallel.shared_data_parallel.memory import HostMemory
from phalanx.parallel.shared_data_parallel.slice_owners import Places
from phalanx.parallel.shared_data_parallel.views import flat, shaped_like

__all__ = ["Views", "check", "check_same", "give_back", "move"]

#: The dtypes of parameters that can be trained; frozen parameters may have any dtype.
TRAINED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)


def check(module: nn.Module) -> None:
    """Check that a module can be made data-parallel, without communication.

    Raises:
        UsageError: No parameter requires a gradient, or a parameter is not supported.
    """
    parameters = list(module.named_parameters())
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise UsageError(
            f"SharedDataParallel: {type(module).__name__} has no parameter that requires a gradient: "
            "use it as it is"
        )
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"SharedDataParallel: parameter {name} has no shape yet: run a forward pass first"
            )
        if parameter.device.type != "cpu" or parameter.layout != torch.strided:
            raise UsageError(
                f"SharedDataParallel: parameter {name} {list(parameter.shape)} is {parameter.layout} on "
                f"{parameter.device}, expected a dense one on the CPU: use PyTorch's "
                "DistributedDataParallel for others"
            )
        if parameter.requires_grad and parameter.dtype not in TRAINED:
            raise UsageError(
                f"SharedDataParallel: parameter {name} {list(parameter.shape)} is {parameter.dtype}, of "
                f"which gradients can't be averaged, expected one of {', '.join(map(str, TRAINED))}"
                ": train it in one of those, or freeze it by requires_grad_(False)"
            )


def check_same(module: nn.Module, places: Places) -> None:
    """Check that all ranks have the same model; block until all have called this.

    Raises:
        UsageError: The models differ; raised on all ranks.
    """
    own = [
        (
            name,
            list(parameter.shape),
            str(parameter.dtype),
            list(parameter.stride()),
            parameter.requires_grad,
        )
        for name, parameter in module.named_parameters()
    ]
    all_of: list[list[tuple[object, ...]]] = [[]] * places.world_size
    dist.all_gather_object(all_of, own, group=places.group)
    for rank, other in enumerate(all_of):
        if other == all_of[0]:
            continue
        length = max(len(other), len(all_of[0]))
        first, second = ([*found, *[None] * (length - len(found))] for found in (all_of[0], other))
        index = next(i for i in range(length) if first[i] != second[i])
        raise UsageError(
            f"SharedDataParallel: the ranks have different models: parameter {index} is "
            f"{_words(first[index])} on rank 0, {_words(second[index])} on rank {rank} of the group"
        )


def _words(found: Sequence[object] | None) -> str:
    if found is None:
        return "missing"
    name, shape, dtype, strides, trainable = found
    return f"{name} {shape} {dtype}, strides {strides}" + ("" if trainable else " (frozen)")


@torch.no_grad()
def move(parameters: Sequence[nn.Parameter], layout: Layout, places: Places) -> HostMemory:
    """Move parameters into memory that the host holds once, with the values of the group's rank 0.

    Each parameter stays the same object. All ranks must call it; it blocks until this host's memory
    has the values.
    """
    memory = HostMemory(layout.bytes, places)
    views: Mapping[int, Tensor] = {
        number: memory.common(spot.start, spot.end, layout.dtypes[number])
        for number, spot in enumerate(layout.spots[: len(parameters)])
    }
    if dist.get_rank(places.group) == 0:
        for number, parameter in enumerate(parameters):
            views[number].copy_(flat(parameter.detach(), parameter))
    if places.rail is not None and places.local_rank == 0:
        for chunk in layout.chunks:
            part = memory.common(chunk.start, chunk.end, torch.uint8)  # bytes of any dtype
            dist.broadcast(part, group=places.rail, group_src=0)
    places.meet()
    for number, parameter in enumerate(parameters):
        spot = layout.spots[number]
        own = memory.own(spot.start, spot.end, parameter.dtype)
        parameter.data = shaped_like(own, parameter)
    give_back()
    return memory


class Views:
    """The parameters' views of the memory, restored if `parameter.data` was reassigned.

    Args:
        parameters: The parameters, after `move`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._views = [(parameter, parameter.detach()) for parameter in parameters]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy data that was assigned to `parameter.data` into the memory, and restore the view.

        Raises:
            UsageError: The data has another shape, dtype or device.
        """
        for parameter, view in self._views:
            data = parameter.data
            if data.data_ptr() == view.data_ptr() and data.stride() == view.stride():
                continue
            if data.shape != view.shape or data.dtype != view.dtype or data.device != view.device:
                raise UsageError(
                    f"SharedDataParallel: a parameter {list(view.shape)} {view.dtype} was given data of "
                    f"{list(data.shape)} {data.dtype} on {data.device}: wrap the module afterwards"
                )
            view.copy_(data)
            parameter.data = view


def give_back() -> None:
    """Return freed memory from the allocator to the operating system.

    By default glibc keeps memory freed in the middle of its heap, which may be a whole model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
