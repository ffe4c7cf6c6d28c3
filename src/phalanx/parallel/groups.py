"""Groups of some ranks of a group, created by all ranks of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.torch_versions import form_local_group, world


def create_group(
    whole: dist.ProcessGroup,
    rank_lists: list[list[int]],
    own: list[int],
    backend_options: object = None,
    *,
    alone: bool = False,
) -> dist.ProcessGroup | None:
    """Create the groups of these ranks; return that of `own`.

    If it has no other rank, there is a group only if `alone`; otherwise the result is None.
    """
    options = _options(whole)
    if backend_options is not None:
        options["pg_options"] = backend_options
    if whole is not dist.group.WORLD:
        # Even for this rank alone, so that all ranks create equally many groups.
        group = form_local_group(own, **options)
        return group if len(own) > 1 or alone else None
    own_group = None
    for ranks in rank_lists:
        if len(ranks) > 1 or alone:
            group = dist.new_group(ranks, **options)
            own_group = group if ranks == own else own_group
    return own_group


def equalize_group_counts(whole: dist.ProcessGroup) -> None:
    """Make each rank of a group a member of equally many groups.

    PyTorch names a group that only its members create by the number of groups in which each member
    is. If groups overlap, these numbers differ, and the members would not find each other. So
    ranks with fewer groups create groups of themselves alone.
    """
    if whole is dist.group.WORLD:
        return
    count = len(world().pg_names)
    counts = [0] * dist.get_world_size(whole)
    dist.all_gather_object(counts, count, group=whole)
    for _ in range(max(counts) - count):
        form_local_group([dist.get_rank()], **_options(whole))


def _options(whole: dist.ProcessGroup) -> dict[str, Any]:
    """Return the options for a new group with the backend and the timeout of this one."""
    options: dict[str, Any] = {"backend": dist.get_backend(whole)}
    timeout = getattr(whole, "timeout", None)  # PyTorch's own groups do not tell it
    if isinstance(timeout, timedelta):
        options["timeout"] = timeout
    return options
