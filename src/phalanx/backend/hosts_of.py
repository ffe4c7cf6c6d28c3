"""Which ranks of a group share a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from phalanx.backend.membership import Membership
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["host_ranks"]


def host_ranks(group: ProcessGroup | None = None) -> list[list[int]]:
    """The ranks of a group by host: those in one list share memory. Blocks for nothing.

    On the backend "phalanx" this is what ranks proved to each other as the group was formed. Of
    other backends nothing is known: each rank counts as a host of its own.

    Args:
        group: The default group if None.

    Returns:
        For each host its ranks in ascending order, numbered as in the default group; hosts in
        order of their lowest rank.

    Raises:
        UsageError: There is no process group, or this rank isn't in `group`.
    """
    if not dist.is_initialized():
        raise UsageError("host_ranks: no process group, expected one: call phalanx.init() first")
    if dist.get_rank(group) < 0:
        raise UsageError("host_ranks: this rank is not a member of the group given")
    ranks = dist.get_process_group_ranks(group)
    actual = group or dist.group.WORLD
    if not isinstance(actual, Membership):
        return [[rank] for rank in ranks]
    return [[ranks[member] for member in host] for host in actual.hosts]
