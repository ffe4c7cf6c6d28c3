"""Patches of `torch.distributed` functions that check a backend's name or class and reject ours.

With a group of Phalanx, each patched function does what it does with a group of Gloo. With all
other groups, it calls PyTorch's own.

Two more patches concern C++ code of PyTorch that expects a group, or a work, written in C++. One
functional collective, the compiler's all_gather into a tensor that it has allocated, requires a
registered backend, which a group in Python does not have. DDP's `join` hands a work to C++ and
drops the Python object, which knows when the work has ended.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx import torch_versions
from phalanx.backend import known_failures

_group_class: type[dist.ProcessGroup] | None = None
"""The class of the groups of Phalanx, once the patches have been applied."""
# The libraries of the registered kernels. A kernel is unregistered when its library is freed.
_kernels: list[torch.library.Library] = []
# The work that DDP's next backward waits for, by module.
_join_works: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()


def apply(group_class: type[dist.ProcessGroup]) -> None:
    """Apply the patches; called for every group, has an effect for the first one only.

    Args:
        group_class: The class of the groups of Phalanx.
    """
    global _group_class  # noqa: PLW0603
    if _group_class is None:
        _group_class = group_class
        _patch("monitored_barrier", _monitored_barrier)
        _patch("destroy_process_group", _destroy_process_group)
        if not torch_versions.GROUPS_SET_TIMEOUT:
            _patch("_set_pg_timeout", _set_pg_timeout)
        _register_kernels()
        _keep_join_works()


def _patch(name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(c10d, name)

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    for module in (c10d, dist):
        if getattr(module, name, None) is original:
            setattr(module, name, call)


def _monitored_barrier(
    original: Callable[..., None],
    group: Any = None,
    timeout: Any = None,
    wait_all_ranks: bool = False,
) -> None:
    phalanx_group = _phalanx_group(group)
    if phalanx_group is None:
        original(group, timeout, wait_all_ranks)
        return
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    phalanx_group.monitored_barrier(timeout, wait_all_ranks)


def _destroy_process_group(original: Callable[..., None], group: Any = None) -> None:
    """Destroy groups as PyTorch does, then raise the error of an operation that nobody has seen."""
    original(group)
    error = known_failures.take()
    if error is not None and sys.exc_info()[1] is None:
        raise error


def _set_pg_timeout(original: Callable[..., None], timeout: timedelta, group: Any = None) -> None:
    phalanx_group = _phalanx_group(group)
    if phalanx_group is None:
        original(timeout, group)
    else:
        phalanx_group.set_timeout(timeout)


def _phalanx_group(group: Any) -> Any:
    """Return the group, or the default group if None, if it is a group of Phalanx; else None."""
    group = dist.group.WORLD if group is None else group
    return group if _group_class is not None and isinstance(group, _group_class) else None


def _register_kernels() -> None:
    # PyTorch has one kernel for all devices. A kernel for one device takes precedence over it
    # without replacing it.
    name = "all_gather_into_tensor_out"
    if torch_versions.has_functional_op(name):
        library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
        for device in ("CPU", "CUDA"):
            library.impl(name, _all_gather_into_tensor_out, device)
        _kernels.append(library)


def _all_gather_into_tensor_out(
    input: torch.Tensor,
    group_size: int,  # noqa: ARG001 - PyTorch's signature
    group: Any,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Do the work of PyTorch's kernel through the group's Python method, for any backend."""
    if isinstance(group, str):
        group = torch_versions.resolve_group(group)
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    work = torch_versions.all_gather_single(out, input, group=group, async_op=True)
    torch_versions.register_work(out, work)  # for wait_tensor
    return out


def _keep_join_works() -> None:
    from torch.distributed.algorithms.join import Join

    original = Join.notify_join_context

    @functools.wraps(original)
    def notify(joinable: Any) -> Any:
        work = original(joinable)
        if work is not None:
            _join_works[joinable] = work
        return work

    Join.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]
