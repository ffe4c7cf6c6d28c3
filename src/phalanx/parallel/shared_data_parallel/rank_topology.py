"""The ranks that share memory, and the owners of slices."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import phalanx
from phalanx.torch_versions import form_local_group


@dataclass(frozen=True)
class RankTopology:
    """This rank's position among the ranks and hosts of a group.

    Attributes:
        group: The group of all ranks.
        host_group: The group of the ranks of this host; None if this rank is alone there.
        rail_group: The group of the ranks with this local rank on all hosts, which own the same
            slices; None if there is one host, or this rank owns nothing.
        local_rank: This rank's index on its host.
        local_size: The number of ranks on this host.
        owners_per_host: The number of ranks of each host that own slices: the size of the smallest
            host.
        host_count: The number of hosts.
    """

    group: dist.ProcessGroup
    host_group: dist.ProcessGroup | None
    rail_group: dist.ProcessGroup | None
    local_rank: int
    local_size: int
    owners_per_host: int
    host_count: int

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""
        return dist.get_world_size(self.group)

    def barrier(self) -> None:
        """Wait until all ranks of this host have called this."""
        if self.host_group is not None:
            dist.barrier(self.host_group)


def find_topology(group: dist.ProcessGroup | None) -> RankTopology:
    """Find this rank's position and create its groups; all ranks of the group must call it."""
    whole = group or dist.group.WORLD
    hosts = phalanx.host_ranks(whole)
    own = next(ranks for ranks in hosts if dist.get_rank() in ranks)
    local_rank, owners = own.index(dist.get_rank()), min(map(len, hosts))
    rail = [ranks[local_rank] for ranks in hosts] if local_rank < owners else [dist.get_rank()]
    assert whole is not None  # there is a default group: host_ranks has checked
    rails = [[ranks[number] for ranks in hosts] for number in range(owners)]
    if whole is not dist.group.WORLD:
        _equalize_group_counts(whole)
    host_group = _create_group(whole, hosts, own)
    rail_group = _create_group(whole, rails, rail)
    return RankTopology(whole, host_group, rail_group, local_rank, len(own), owners, len(hosts))


def _create_group(
    whole: dist.ProcessGroup, rank_lists: list[list[int]], own: list[int]
) -> dist.ProcessGroup | None:
    """Create the groups of these ranks; return that of `own`, or None if it has no other rank."""
    if whole is not dist.group.WORLD:
        # Even for this rank alone, so that all ranks create equally many groups.
        group = form_local_group(own, **_options(whole))
        return group if len(own) > 1 else None
    own_group = None
    for ranks in rank_lists:
        if len(ranks) > 1:
            group = dist.new_group(ranks, **_options(whole))
            own_group = group if ranks == own else own_group
    return own_group


def _equalize_group_counts(whole: dist.ProcessGroup) -> None:
    """Make each rank of a group a member of equally many groups.

    PyTorch names a group that only its members create by the number of groups in which each member
    is. If groups overlap, these numbers differ, and the members would not find each other. So
    ranks with fewer groups create groups of themselves alone.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    counts = [0] * dist.get_world_size(whole)
    dist.all_gather_object(counts, count, group=whole)
    for _ in range(max(counts) - count):
        form_local_group([dist.get_rank()], **_options(whole))


def _options(whole: dist.ProcessGroup) -> dict[str, Any]:
    """Return the options for a new group with the backend and the timeout of this one."""
    options: dict[str, Any] = {"backend": dist.get_backend(whole)}
    timeout = getattr(whole, "_timeout", None)  # PyTorch has no public API for it
    if isinstance(timeout, float):
        options["timeout"] = timedelta(seconds=timeout)
    return options
