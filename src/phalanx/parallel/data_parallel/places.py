"""Who shares memory with whom, and which rank owns which slices."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import phalanx

__all__ = ["Places", "find_places"]


@dataclass(frozen=True)
class Places:
    """This rank's place among those of a group.

    Attributes:
        group: All ranks.
        host: The group of this rank's host; None if it is alone there.
        rail: The group of the ranks with this local rank on all hosts, which own the same slices;
            None if there is one host, or this rank owns nothing.
        local_rank: This rank's number on its host.
        local_size: Ranks on its host.
        owners: Ranks of each host that own slices: as many as the smallest host has.
        hosts: How many hosts there are.
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
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    @property
    def owns(self) -> bool:
        """Whether this rank owns a slice of each chunk."""
        return self.local_rank < self.owners

    def meet(self) -> None:
        """Wait until all ranks of this host have come."""
        if self.host is not None:
            dist.barrier(self.host)


def find_places(group: dist.ProcessGroup | None) -> Places:
    """Find this rank's place and form the groups that it needs; all ranks of the group call it."""
    whole = group or dist.group.WORLD
    hosts = phalanx.host_ranks(whole)
    own = next(ranks for ranks in hosts if dist.get_rank() in ranks)
    local_rank, owners = own.index(dist.get_rank()), min(map(len, hosts))
    rail = [ranks[local_rank] for ranks in hosts] if local_rank < owners else [dist.get_rank()]
    assert whole is not None  # there is a default group: host_ranks has looked
    rails = [[ranks[number] for ranks in hosts] for number in range(owners)]
    if whole is not dist.group.WORLD:
        _even_out(whole)
    host = _form(whole, hosts, own)
    between = _form(whole, rails, rail)
    return Places(whole, host, between, local_rank, len(own), owners, len(hosts))


def _form(
    whole: dist.ProcessGroup, every: list[list[int]], own: list[int]
) -> dist.ProcessGroup | None:
    """Form the groups of these ranks, of which this rank is in `own`; None if it is alone there."""
    if whole is not dist.group.WORLD:
        formed = _form_locally(whole, own)  # by every rank, though it may be of itself alone
        return formed if len(own) > 1 else None
    mine = None
    for ranks in every:
        if len(ranks) > 1:
            group = dist.new_group(ranks, **_options(whole))
            mine = group if ranks == own else mine
    return mine


def _form_locally(whole: dist.ProcessGroup, own: list[int]) -> dist.ProcessGroup:
    """Form a group that only its members form."""
    formed: dist.ProcessGroup = dist.new_group(
        own, use_local_synchronization=True, **_options(whole)
    )
    return formed


def _even_out(whole: dist.ProcessGroup) -> None:
    """Have each rank of a group be in as many groups as the others are.

    PyTorch names a group that only its members form by how many groups each of them is in: where
    groups overlap, they wouldn't find each other. So a rank forms some of itself alone.
    """
    known = len(dist.distributed_c10d._world.pg_names)
    every = [0] * dist.get_world_size(whole)
    dist.all_gather_object(every, known, group=whole)
    for _ in range(max(every) - known):
        _form_locally(whole, [dist.get_rank()])


def _options(whole: dist.ProcessGroup) -> dict[str, Any]:
    """Of a group that is made as that one was."""
    options: dict[str, Any] = {"backend": dist.get_backend(whole)}
    seconds = getattr(whole, "_timeout", None)  # PyTorch has no public way to ask
    if isinstance(seconds, float):
        options["timeout"] = timedelta(seconds=seconds)
    return options
