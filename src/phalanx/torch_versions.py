"""Differences between the supported versions of PyTorch.

No other module compares versions or checks if PyTorch has a name. The methods that PyTorch calls
on a group are exempt: a group implements the names of all versions at once.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable

SUPPORTED = (2, 11), (2, 14)
"""The oldest and the newest release that Phalanx is tested with."""

# Renamed in 2.13, which warns on every call of the old names.
all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

tensor_use_count: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)
"""Return the number of C++ references to a tensor, including its Python object's.

None if PyTorch has no such method.
"""

TENSOR_TABLE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""PyTorch's table of C functions for its tensors, a capsule; None if it has none."""

OBSERVER_FLAGS: list[tuple[Any, str]] = [
    (module, name)
    for module, name in (
        (torch.autograd.profiler, "_is_profiler_enabled"),
        (_python_dispatch, "_is_in_torch_dispatch_mode"),
    )
    if hasattr(module, name)
]
"""Names in modules that are False while no profiler and no dispatch mode is active in the process.

PyTorch has them for quick checks. Empty unless it has both.
"""
if len(OBSERVER_FLAGS) < 2:
    OBSERVER_FLAGS = []

GROUPS_SET_TIMEOUT = hasattr(dist, "set_timeout")
"""True if PyTorch sets the timeout of any group through the group's method, as from 2.14 on."""

FACTORY = "_new_process_group_helper"
"""The private function of PyTorch that forms every group."""

# Larger than the numbers in the names of other groups.
_LOCAL_GROUPS = 1 << 32

_FACTORY_PARAMETERS = frozenset(
    "group_size group_rank global_ranks_in_group backend store group_name timeout".split()
)


def is_tested(version: str) -> bool:
    """Return whether a PyTorch version, such as "2.13.0+cpu", is in the tested range."""
    oldest, newest = SUPPORTED
    return oldest <= _release(version) <= newest


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def group_factory() -> Callable[..., Any]:
    """Return the private function of PyTorch that forms every group.

    Raises:
        ValueError: PyTorch has no such function, or has changed its parameters.
    """
    factory: Callable[..., Any] | None = getattr(c10d, FACTORY, None)
    if factory is None or not _FACTORY_PARAMETERS.issubset(inspect.signature(factory).parameters):
        raise ValueError(
            f"PHALANX_REPLACE: torch {torch.__version__} forms groups in a way that this version "
            "of Phalanx does not know, so it cannot replace another backend: unset the "
            'variable (or omit --replace) and name the backend "phalanx" in the script'
        )
    return factory


def form_local_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
    """Form a group with only its members, as `new_group(use_local_synchronization=True)` does.

    The members must agree on the number of groups that each is in, since PyTorch puts that number
    in the name of the group. From 2.14 on, PyTorch instead counts the groups that a rank has
    formed, and names all later groups by that count. After a local group, its members could then
    form no group with ranks outside it. This function therefore restores the count.
    """
    world: Any = c10d._world
    formed = world.group_count
    if _release(torch.__version__) >= (2, 14):
        world.group_count = _LOCAL_GROUPS + len(world.pg_names)
    try:
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        world.group_count = formed
    return group


def has_functional_op(name: str) -> bool:
    """Return whether PyTorch has a functional collective of this name."""
    return hasattr(torch.ops._c10d_functional, name)


def shutdown_timeout(options: object, default: int | None = None) -> int | None:
    """Return torchrun's --shutdown-timeout from its parsed options or its configuration.

    Args:
        options: The `Namespace` of torchrun's parser, or its `LaunchConfig`.
        default: The value to return if torchrun has no such option, as in 2.11.
    """
    timeout: int | None = getattr(options, "shutdown_timeout", default)
    return timeout
