"""The move of a model's parameters into memory that the ranks of a host share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel.layout import Layout, make_layout
from phalanx.parallel.shared_data_parallel.memory import (
    HostMemory,
    RankTopology,
    find_topology,
    shaped_like,
)

#: The dtypes of parameters that can be trained; frozen parameters may have any dtype.
TRAINABLE_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class SharedParameters:
    """The parameters of a model, in memory that the ranks of a host share.

    Attributes:
        trained: The parameters that are trained. Their numbers are their indices here.
        layout: The layout of the trained parameters, and of their gradients.
        topology: The ranks and hosts.
        memory: The memory of the trained parameters.
        views: The view of the memory of each parameter, including frozen ones.
    """

    trained: list[nn.Parameter]
    layout: Layout
    topology: RankTopology
    memory: HostMemory
    views: list[tuple[nn.Parameter, Tensor]]

    @torch.no_grad()
    def restore_views(self) -> None:
        """Copy data that was assigned to `parameter.data` into the memory, and restore the view.

        Raises:
            UsageError: The data has another shape, dtype or device.
        """
        for parameter, view in self.views:
            data = parameter.data
            if data.data_ptr() == view.data_ptr() and data.stride() == view.stride():
                continue
            if data.shape != view.shape or data.dtype != view.dtype or data.device != view.device:
                raise UsageError(
                    f"SharedDataParallel: a parameter {list(view.shape)} {view.dtype} was given "
                    f"data of {list(data.shape)} {data.dtype} on {data.device}: wrap the module "
                    "after that assignment"
                )
            view.copy_(data)
            parameter.data = view


def share_parameters(
    module: nn.Module, group: dist.ProcessGroup | None, bucket_bytes: int
) -> SharedParameters:
    """Move a module's parameters into shared memory; all ranks of the group must call it.

    Args:
        module: The module, whose parameters take the values of the group's rank 0.
        group: The group of ranks; the default group if None.
        bucket_bytes: The size of a bucket in bytes.

    Raises:
        UsageError: The models of the ranks differ.
        PhalanxError: There is not enough memory.
    """
    topology = find_topology(group)
    _check_same_model(module, topology)
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    layout = make_layout(trained, topology.owners_per_host, bucket_bytes)
    memory = _move_to_shared_memory(trained, layout, topology)
    if frozen := [parameter for parameter in parameters if not parameter.requires_grad]:
        _move_to_shared_memory(frozen, make_layout(frozen, 1, bucket_bytes), topology)
    views = [(parameter, parameter.detach()) for parameter in parameters]
    return SharedParameters(trained, layout, topology, memory, views)


def check_supported(module: nn.Module) -> None:
    """Check that a module can be made data-parallel, without communication.

    Raises:
        UsageError: No parameter requires a gradient, or a parameter is not supported.
    """
    parameters = list(module.named_parameters())
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise UsageError(
            f"SharedDataParallel: {type(module).__name__} has no parameter that requires a "
            "gradient: use it without a wrapper"
        )
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"SharedDataParallel: parameter {name} has no shape yet: run a forward pass first"
            )
        if parameter.device.type != "cpu" or parameter.layout != torch.strided:
            raise UsageError(
                f"SharedDataParallel: parameter {name} {list(parameter.shape)} is "
                f"{parameter.layout} on {parameter.device}, expected a dense one on the CPU: use "
                "PyTorch's DistributedDataParallel for others"
            )
        if parameter.requires_grad and parameter.dtype not in TRAINABLE_DTYPES:
            raise UsageError(
                f"SharedDataParallel: parameter {name} {list(parameter.shape)} is "
                f"{parameter.dtype}, whose gradients cannot be averaged, expected one of "
                f"{', '.join(map(str, TRAINABLE_DTYPES))}: train it in one of those, or freeze it "
                "by requires_grad_(False)"
            )


def _check_same_model(module: nn.Module, topology: RankTopology) -> None:
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
    by_rank: list[list[tuple[object, ...]]] = [[]] * topology.world_size
    dist.all_gather_object(by_rank, own, group=topology.group)
    for rank, other in enumerate(by_rank):
        if other == by_rank[0]:
            continue
        length = max(len(other), len(by_rank[0]))
        first, second = ([*found, *[None] * (length - len(found))] for found in (by_rank[0], other))
        index = next(i for i in range(length) if first[i] != second[i])
        raise UsageError(
            f"SharedDataParallel: the ranks have different models: parameter {index} is "
            f"{_describe_parameter(first[index])} on rank 0, {_describe_parameter(second[index])} "
            f"on rank {rank} of the group"
        )


def _describe_parameter(found: Sequence[object] | None) -> str:
    if found is None:
        return "missing"
    name, shape, dtype, strides, trainable = found
    return f"{name} {shape} {dtype}, strides {strides}" + ("" if trainable else " (frozen)")


@torch.no_grad()
def _move_to_shared_memory(
    parameters: Sequence[nn.Parameter], layout: Layout, topology: RankTopology
) -> HostMemory:
    """Move parameters into memory that the host holds once, with the values of the group's rank 0.

    Each parameter stays the same object. All ranks must call it; it blocks until this host's memory
    has the values.
    """
    memory = HostMemory(layout.bytes, topology)
    slots = layout.slots[: len(parameters)]
    if dist.get_rank(topology.group) == 0:
        for parameter, slot in zip(parameters, slots, strict=True):
            common = memory.shared(slot.start, slot.end, parameter.dtype)
            shaped_like(common, parameter).copy_(parameter)
    if topology.rail_group is not None and topology.local_rank == 0:
        for bucket in layout.buckets:
            part = memory.shared(bucket.start, bucket.end, torch.uint8)  # bytes of any dtype
            dist.broadcast(part, group=topology.rail_group, group_src=0)
    topology.barrier()
    for parameter, slot in zip(parameters, slots, strict=True):
        own = memory.replica(slot.start, slot.end, parameter.dtype)
        parameter.data = shaped_like(own, parameter)
    trim_heap()
    return memory


def trim_heap() -> None:
    """Return freed memory from the allocator to the operating system.

    By default glibc keeps memory freed in the middle of its heap, which may be a whole model.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if malloc_trim is not None:
        malloc_trim(0)
