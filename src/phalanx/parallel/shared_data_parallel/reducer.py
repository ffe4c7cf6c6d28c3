"""The reduction of buckets of gradients to their averages over all ranks.

A rank writes its part of a bucket to `buffer`, which is always the same, after `acquire_buffer` has
returned True: it does so if the memory may be written again, and with `wait` it blocks until then.
`launch` starts to reduce the bucket, and once `finish` returns the average is in the memory of the
host. Every rank does this for the same buckets in the same order.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx
from phalanx.parallel.shared_data_parallel.layout import Layout
from phalanx.parallel.shared_data_parallel.memory import HostMemory, RankTopology
from phalanx.torch_versions import reduce_scatter_single

# The maximum number of buckets in progress: those that a rank has written and others may still
# read.
MAX_IN_FLIGHT = 2


def make_reducer(
    layout: Layout, memory: HostMemory, topology: RankTopology, *, concurrent: bool
) -> _SingleRankReducer | _SharedMemoryReducer:
    """Make a reducer for ranks that share memory, or for a rank that is alone on its host.

    If cores are idle, or if `concurrent` is true, buckets are reduced concurrently with the rank's
    own work, so that `launch` never blocks.
    """
    if topology.host_group is None:
        return _SingleRankReducer(layout, memory, topology)
    # If no core is idle, another thread would only take turns with this one.
    idle = len(os.sched_getaffinity(0)) > topology.local_size
    return _SharedMemoryReducer(layout, memory, topology, concurrent=concurrent or idle)


class _SingleRankReducer:
    """A reducer for a rank that is alone on its host; its buffer is the memory of averages."""

    def __init__(self, layout: Layout, memory: HostMemory, topology: RankTopology) -> None:
        self._buckets = [
            memory.shared(bucket.start, bucket.end, bucket.dtype) for bucket in layout.buckets
        ]
        self._topology = topology
        self._works: list[Any] = []

    def buffer(self, bucket: int) -> Tensor:
        return self._buckets[bucket]

    def acquire_buffer(self, bucket: int, *, wait: bool) -> bool:  # noqa: ARG002 - never reused
        return True

    def launch(self, bucket: int) -> None:
        if self._topology.rail_group is not None:
            rail = self._topology.rail_group
            self._works.append(dist.all_reduce(self._buckets[bucket], group=rail, async_op=True))

    def finish(self) -> None:
        for work, bucket in zip(self._works, self._buckets, strict=False):
            work.wait()
            bucket.div_(self._topology.world_size)
        self._works.clear()


class _SharedMemoryReducer:
    """A reducer for ranks that share memory, in which each owner reduces its slice of all parts.

    The parts are summed in the order of local ranks. With several hosts, the backend's all-reduce
    between the owners of the same slices follows.
    """

    def __init__(
        self, layout: Layout, memory: HostMemory, topology: RankTopology, *, concurrent: bool
    ) -> None:
        self._topology = topology
        self._concurrent = concurrent
        largest = max(bucket.end - bucket.start for bucket in layout.buckets)
        memories = [
            phalanx.empty_shared(largest, dtype=torch.uint8)
            for _ in range(min(MAX_IN_FLIGHT if self._concurrent else 1, len(layout.buckets)))
        ]
        self._buffers = [
            memories[number % len(memories)][: bucket.end - bucket.start].view(bucket.dtype)
            for number, bucket in enumerate(layout.buckets)
        ]
        self._buffer_count = len(memories)
        self._own_slices = [  # none if this rank is not an owner
            memory.shared(part.start, part.end, part.dtype)
            for part in layout.slices(topology.local_rank)
        ]
        self._reductions = [self._make_reductions(bucket) for bucket in range(len(layout.buckets))]
        self._local_works: deque[tuple[int, list[Any]]] = deque()
        self._rail_works: deque[tuple[int, Any]] = deque()

    def buffer(self, bucket: int) -> Tensor:
        return self._buffers[bucket]

    def acquire_buffer(self, bucket: int, *, wait: bool) -> bool:
        while self._local_works and self._local_works[0][0] <= bucket - self._buffer_count:
            if not wait and not all(work.is_completed() for work in self._local_works[0][1]):
                return False
            self._complete_local()
        return True

    def launch(self, bucket: int) -> None:
        works = [run() for run in self._reductions[bucket]]
        self._local_works.append((bucket, [work for work in works if work is not None]))
        if not self._concurrent:
            self._complete_local()

    def _make_reductions(self, bucket: int) -> list[Callable[[], Any]]:
        """Return the operations that reduce a bucket on this host; concurrent ones return works."""
        topology, buffer = self._topology, self._buffers[bucket]
        options: dict[str, Any] = {"group": topology.host_group}
        make: Callable[..., Callable[[], Any]] = phalanx.prepare
        if self._concurrent:
            make, options["async_op"] = functools.partial, True
        if topology.local_size > topology.owners_per_host:
            return [
                make(dist.reduce, part, group_dst=owner, **options)
                for owner, part in enumerate(buffer.chunk(topology.owners_per_host))
            ]
        op = dist.ReduceOp.AVG if topology.host_count == 1 else dist.ReduceOp.SUM
        return [make(reduce_scatter_single, self._own_slices[bucket], buffer, op=op, **options)]

    def finish(self) -> None:
        while self._local_works:
            self._complete_local()
        while self._rail_works:
            bucket, work = self._rail_works.popleft()
            work.wait()
            self._own_slices[bucket].div_(self._topology.world_size)
        self._topology.barrier()

    def _complete_local(self) -> None:
        """Wait for the oldest bucket of this host, and start its all-reduce over the hosts."""
        topology = self._topology
        bucket, works = self._local_works.popleft()
        for work in works:
            work.wait()
        if topology.local_size > topology.owners_per_host and self._own_slices:
            self._own_slices[bucket].copy_(
                self._buffers[bucket].chunk(topology.owners_per_host)[topology.local_rank]
            )
        if topology.rail_group is not None:
            work = dist.all_reduce(
                self._own_slices[bucket], group=topology.rail_group, async_op=True
            )
            self._rail_works.append((bucket, work))
