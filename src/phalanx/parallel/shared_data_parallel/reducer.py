"""The reduction of chunks of gradients to their averages over all ranks.

A rank writes its chunk to `room`, `launch` starts to reduce it, and once `finish` returns the
average is in the memory of the host. Every rank does this for the same chunks in the same order.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx
from phalanx.parallel.shared_data_parallel.layout import Layout
from phalanx.parallel.shared_data_parallel.memory import HostMemory
from phalanx.parallel.shared_data_parallel.slice_owners import Places
from phalanx.torch_versions import reduce_scatter_single

__all__ = ["Reducer", "reducer"]

# The maximum number of chunks in progress: those that a rank has written and others may still read.
UNDER_WAY = 2


class Reducer(Protocol):
    """The interface of a reducer, which reduces the chunks of a layout one after another."""

    def room(self, chunk: int) -> Tensor:
        """Return flat memory for this rank's part of a chunk, always the same."""
        ...

    def has_room(self, chunk: int, *, wait: bool) -> bool:
        """Return whether that memory may be written again; if `wait`, block until it may."""
        ...

    def launch(self, chunk: int) -> None:
        """Start to reduce a chunk that has been written."""
        ...

    def finish(self) -> None:
        """Wait until all chunks are reduced on all ranks of this host."""
        ...


def reducer(layout: Layout, memory: HostMemory, places: Places, *, beside: bool) -> Reducer:
    """Make a reducer for ranks that share memory, or for a rank that is alone on its host.

    If cores are idle, or if `beside` is true, chunks are reduced concurrently with the rank's own
    work, so that `launch` never blocks.
    """
    if places.host is None:
        return _Alone(layout, memory, places)
    # If no core is idle, another thread would only take turns with this one.
    idle = len(os.sched_getaffinity(0)) > places.local_size
    return _Together(layout, memory, places, beside=beside or idle)


class _Alone:
    """A reducer for a rank that is alone on its host, whose room is the memory of the averages."""

    def __init__(self, layout: Layout, memory: HostMemory, places: Places) -> None:
        self._chunks = [memory.common(cut.start, cut.end, cut.dtype) for cut in layout.chunks]
        self._places = places
        self._works: list[Any] = []

    def room(self, chunk: int) -> Tensor:
        return self._chunks[chunk]

    def has_room(self, chunk: int, *, wait: bool) -> bool:  # noqa: ARG002 - the room is not reused
        return True

    def launch(self, chunk: int) -> None:
        if self._places.rail is not None:
            rail = self._places.rail
            self._works.append(dist.all_reduce(self._chunks[chunk], group=rail, async_op=True))

    def finish(self) -> None:
        for work, chunk in zip(self._works, self._chunks, strict=False):
            work.wait()
            chunk.div_(self._places.world_size)
        self._works.clear()


class _Together:
    """A reducer for ranks that share memory, in which each owner reduces its slice of all parts.

    The parts are summed in the order of local ranks. With several hosts, the backend's all-reduce
    between the owners of the same slices follows.
    """

    def __init__(self, layout: Layout, memory: HostMemory, places: Places, *, beside: bool) -> None:
        self._layout = layout
        self._places = places
        self._beside = beside
        longest = max(chunk.end - chunk.start for chunk in layout.chunks)
        slots = [
            phalanx.empty_shared(longest, dtype=torch.uint8)
            for _ in range(min(UNDER_WAY if self._beside else 1, len(layout.chunks)))
        ]
        self._rooms = [
            slots[number % len(slots)][: chunk.end - chunk.start].view(chunk.dtype)
            for number, chunk in enumerate(layout.chunks)
        ]
        self._slots = len(slots)
        self._mine: list[Tensor] = []
        if places.owns:
            self._mine = [
                memory.common(cut.start, cut.end, cut.dtype)
                for cut in layout.slices(places.local_rank)
            ]
        self._local: deque[tuple[int, list[Any]]] = deque()
        self._rails: deque[tuple[int, Any]] = deque()

    def room(self, chunk: int) -> Tensor:
        return self._rooms[chunk]

    def has_room(self, chunk: int, *, wait: bool) -> bool:
        while self._local and self._local[0][0] <= chunk - self._slots:
            if not wait and not all(work.is_completed() for work in self._local[0][1]):
                return False
            self._pass_on()
        return True

    def launch(self, chunk: int) -> None:
        places, room = self._places, self._rooms[chunk]
        if places.local_size > places.owners:
            works = [
                dist.reduce(part, group=places.host, group_dst=owner, async_op=self._beside)
                for owner, part in enumerate(room.chunk(places.owners))
            ]
        else:
            op = dist.ReduceOp.AVG if places.hosts == 1 else dist.ReduceOp.SUM
            works = [
                reduce_scatter_single(
                    self._mine[chunk], room, op=op, group=places.host, async_op=self._beside
                )
            ]
        self._local.append((chunk, [work for work in works if work is not None]))
        if not self._beside:
            self._pass_on()

    def finish(self) -> None:
        while self._local:
            self._pass_on()
        while self._rails:
            chunk, work = self._rails.popleft()
            work.wait()
            self._mine[chunk].div_(self._places.world_size)
        self._places.meet()

    def _pass_on(self) -> None:
        """Wait for the oldest chunk of this host, and start its all-reduce over the hosts."""
        places = self._places
        chunk, works = self._local.popleft()
        for work in works:
            work.wait()
        if places.local_size > places.owners and places.owns:
            self._mine[chunk].copy_(self._rooms[chunk].chunk(places.owners)[places.local_rank])
        if places.rail is not None:
            work = dist.all_reduce(self._mine[chunk], group=places.rail, async_op=True)
            self._rails.append((chunk, work))
