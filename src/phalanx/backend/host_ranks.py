"""The function `phalanx.host_ranks`, which returns the ranks of a group by host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from phalanx.backend.membership import Membership
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["host_ranks"]


def host_ranks(group: ProcessGroup | None = None) -> list[list[int]]:
    """Return the ranks of a group by host; the ranks in one list share memory. Never blocks.

    On the backend "phalanx", the ranks proved this to each other when the group was formed. On
    other backends it is unknown, and each rank counts as a host of its own.

    Args:
        group: The group; None for the default group.

    Returns:
        A list of ranks in ascending order for each host, numbered as in the default group. Hosts
        are in order of their lowest rank.

    Raises:
        UsageError: There is no process group, or this rank is not in `group`.
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
