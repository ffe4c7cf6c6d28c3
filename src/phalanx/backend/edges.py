"""Functions of `torch.distributed` that look at a backend's name or class, and refuse ours.

They are few, and each does for a group of Phalanx what it does for one of Gloo. For all other
groups they are PyTorch's own.

Beside them are two places where PyTorch's C++ takes a group, or a work, for one written in C++.
One functional collective asks for a registered backend, which a group in Python doesn't have: the
compiler's all_gather into a tensor that it has made. And DDP's `join` hands its C++ a work and
drops the Python object, which is what knows when the work has ended.
"""

from __future__ import annotations

import functools
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.backend.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Callable

_done = False
# A kernel is registered for as long as its library lives.
_kernels: list[torch.library.Library] = []
# What DDP's next backward waits for, by module.
_announced: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()


def smooth() -> None:
    """Make those functions accept groups of Phalanx; once, when the first group is made."""
    global _done  # noqa: PLW0603
    if not _done:
        _done = True
        _put("monitored_barrier", _monitored_barrier)
        _put("_set_pg_timeout", _set_pg_timeout)
        _register_kernels()
        _keep_announcements()


def _put(name: str, ours: Callable[..., Any]) -> None:
    theirs = getattr(c10d, name, None)
    if theirs is None:  # a PyTorch that has dropped it
        return

    @functools.wraps(theirs)
    def call(*args: Any, **options: Any) -> Any:
        return ours(theirs, *args, **options)

    for module in (c10d, dist):
        if getattr(module, name, None) is theirs:
            setattr(module, name, call)


def _monitored_barrier(
    theirs: Callable[..., None],
    group: Any = None,
    timeout: Any = None,
    wait_all_ranks: bool = False,
) -> None:
    ours = _ours(group)
    if ours is None:
        theirs(group, timeout, wait_all_ranks)
        return
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    ours.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]


def _set_pg_timeout(theirs: Callable[..., None], timeout: timedelta, group: Any = None) -> None:
    ours = _ours(group)
    if ours is None:
        theirs(timeout, group)
    else:
        ours.set_timeout(timeout)


def _ours(group: Any) -> Membership | None:
    """The group, or the default one, if it is a group of Phalanx."""
    group = dist.group.WORLD if group is None else group
    return group if isinstance(group, Membership) else None


def _register_kernels() -> None:
    # PyTorch has one kernel for all devices. One for a device goes before it, and replaces nothing.
    name = "all_gather_into_tensor_out"
    if hasattr(torch.ops._c10d_functional, name):
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
    """Do what PyTorch's kernel does, for a group of any backend, through its Python method."""
    if isinstance(group, str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group
        group = resolve(group)
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    # Its name before PyTorch 2.13.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    work = gather(out, input, group=group, async_op=True)
    torch._C._distributed_c10d._register_work(out, work)  # for wait_tensor
    return out


def _keep_announcements() -> None:
    from torch.distributed.algorithms.join import Join

    theirs = Join.notify_join_context

    @functools.wraps(theirs)
    def notify(joinable: Any) -> Any:
        work = theirs(joinable)
        if work is not None:
            _announced[joinable] = work
        return work

    Join.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]
