"""The ranks that share memory, and the owners of slices."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import phalanx
from phalanx.torch_versions import form_local_group

__all__ = ["Places", "find_places"]


@dataclass(frozen=True)
class Places:
    """This rank's position among the ranks and hosts of a group.

    Attributes:
        group: The group of all ranks.
        host: The group of the ranks of this host; None if this rank is alone there.
        rail: The group of the ranks with this local rank on all hosts, which own the same slices;
            None if there is one host, or this rank owns nothing.
        local_rank: This rank's index on its host.
        local_size: The number of ranks on this host.
        owners: The number of ranks of each host that own slices: the size of the smallest host.
        hosts: The number of hosts.
    """

    group: dist.ProcessGroup
    host: dist.ProcessGroup | None
    rail: dist.ProcessGroup | None
    local_rank: int
    local_size: int
    owners: int
    hosts: int

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""
        return dist.get_world_size(self.group)

    @property
    def owns(self) -> bool:
        """True if this rank owns a slice of each chunk."""
        return self.local_rank < self.owners

    def meet(self) -> None:
        """Wait until all ranks of this host have called this."""
        if self.host is not None:
            dist.barrier(self.host)


def find_places(group: dist.ProcessGroup | None) -> Places:
    """Find this rank's position and form its groups; all ranks of the group must call it."""
    whole = group or dist.group.WORLD
    hosts = phalanx.host_ranks(whole)
    own = next(ranks for ranks in hosts if dist.get_rank() in ranks)
    local_rank, owners = own.index(dist.get_rank()), min(map(len, hosts))
    rail = [ranks[local_rank] for ranks in hosts] if local_rank < owners else [dist.get_rank()]
    assert whole is not None  # there is a default group: host_ranks has checked
    rails = [[ranks[number] for ranks in hosts] for number in range(owners)]
    if whole is not dist.group.WORLD:
        _even_out(whole)
    host = _form(whole, hosts, own)
    between = _form(whole, rails, rail)
    return Places(whole, host, between, local_rank, len(own), owners, len(hosts))


def _form(
    whole: dist.ProcessGroup, every: list[list[int]], own: list[int]
) -> dist.ProcessGroup | None:
    """Form the groups of these ranks; return that of `own`, or None if this rank is alone in it."""
    if whole is not dist.group.WORLD:
        formed = _form_locally(whole, own)  # even alone, so that all ranks form equally many groups
        return formed if len(own) > 1 else None
    mine = None
    for ranks in every:
        if len(ranks) > 1:
            group = dist.new_group(ranks, **_options(whole))
            mine = group if ranks == own else mine
    return mine


def _form_locally(whole: dist.ProcessGroup, own: list[int]) -> dist.ProcessGroup:
    """Form a group by a collective call of its members only."""
    return form_local_group(own, **_options(whole))


def _even_out(whole: dist.ProcessGroup) -> None:
    """Make each rank of a group a member of equally many groups.

    PyTorch names a group that only its members form by the number of groups in which each member
    is. If groups overlap, these numbers differ, and the members would not find each other. So
    ranks with fewer groups form groups of themselves alone.
    """
    known = len(dist.distributed_c10d._world.pg_names)
    every = [0] * dist.get_world_size(whole)
    dist.all_gather_object(every, known, group=whole)
    for _ in range(max(every) - known):
        _form_locally(whole, [dist.get_rank()])


def _options(whole: dist.ProcessGroup) -> dict[str, Any]:
    """Return the options for a new group with the backend and the timeout of this one."""
    options: dict[str, Any] = {"backend": dist.get_backend(whole)}
    seconds = getattr(whole, "_timeout", None)  # PyTorch has no public API for it
    if isinstance(seconds, float):
        options["timeout"] = timedelta(seconds=seconds)
    return options
