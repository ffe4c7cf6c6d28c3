"""The ranks that share memory, that memory, and its views as tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import phalanx
from phalanx import _native
from phalanx.errors import PhalanxError
from phalanx.parallel.groups import create_group, equalize_group_counts
from phalanx.parallel.shared_data_parallel.layout import PAGE_BYTES, Bucket, round_up


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
    equalize_group_counts(whole)
    host_group = create_group(whole, hosts, own)
    rail_group = create_group(whole, rails, rail)
    return RankTopology(whole, host_group, rail_group, local_rank, len(own), owners, len(hosts))


class HostMemory:
    """Zeroed memory of a host, of which each rank sees a replica of its own.

    Only the rank itself sees what it writes to a tensor made by `replica`: the kernel copies the
    page (copy on write). All ranks see what it writes to a tensor made by `shared`, except in pages
    of which they have such a copy. Reading makes no copy. All ranks of the host must construct it
    together, and block until all have.

    Args:
        size: The size in bytes, which is rounded up to whole pages.
        topology: The ranks of this host.

    Raises:
        PhalanxError: There is not enough memory (raised on all ranks of the host), or this rank
            cannot map it.
    """

    def __init__(self, size: int, topology: RankTopology) -> None:
        self._size = round_up(max(size, 1), PAGE_BYTES)
        memory, problem = None, ""
        if topology.local_rank == 0:
            try:
                memory = _native.CowMemory.create(self._size)
            except OSError as error:
                problem = error.strerror or str(error)
        if topology.host_group is not None:
            message = [(os.getpid(), memory.descriptor if memory else -1, problem)]
            dist.broadcast_object_list(message, group=topology.host_group, group_src=0)
            pid, descriptor, problem = message[0]
            failure = None
            if not problem and topology.local_rank:
                try:
                    memory = _native.CowMemory.open(pid, descriptor, self._size)
                except OSError as error:
                    failure = PhalanxError(
                        f"cannot map the memory of a model, created by process {pid} of this host: "
                        f"{error.strerror}"
                    )
            topology.barrier()
            if failure is not None:
                raise failure
        if memory is None:
            raise PhalanxError(
                f"no shared memory for {self._size} bytes of a model ({problem}): free memory, or "
                "use DistributedDataParallel"
            )
        memory.close_descriptor()
        self._memory = memory

    def replica(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return this rank's replica of bytes `start` to `end`, a 1-D tensor with own storage."""
        if start == end:
            return torch.empty(0, dtype=dtype, device="cpu")
        return from_dlpack(self._memory.private_view(start, end - start)).view(dtype)

    def shared(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return bytes `start` to `end`, common to all ranks of the host, as a 1-D tensor."""
        if start == end:
            return torch.empty(0, dtype=dtype, device="cpu")
        return from_dlpack(self._memory.shared_view(start, end - start)).view(dtype)

    def publish(self, slices: Iterable[Bucket]) -> None:
        """Make this rank's writes to slices of its replica common to all ranks."""
        for part in slices:
            self._memory.publish(part.start, part.end - part.start)

    def discard(self) -> int:
        """Drop this rank's writes to its replica; return the number of pages that it had."""
        return self._memory.drop(0, self._size)


def shaped_like(memory: Tensor, like: Tensor) -> Tensor:
    """View flat memory as a tensor with the shape of `like`, and its strides if it is dense.

    A channels-last weight, for example, keeps its strides.
    """
    return memory.as_strided(like.shape, torch.empty_like(like, device="meta").stride())


def flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of a tensor as a 1-D tensor, in the order of a dense tensor `like`.

    The result is a view if `tensor` has the same strides, otherwise a copy.
    """
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
