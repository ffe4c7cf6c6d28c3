"""A synchronous step of trainers on the servers' host: in memory, without a remote call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
)

from phalanx.embedding.arguments import MODES
from phalanx.embedding.gradients import Addresses, Batch, Share
from phalanx.errors import PhalanxError, UsageError

if TYPE_CHECKING:
    from phalanx.embedding.lookup import Memory, Rows

__all__ = ["Together"]

# Options for the group's own methods: the functions of `torch.distributed` would double the time.
_GATHER, _REDUCE = AllgatherOptions(), AllreduceOptions()
_GATHER.asyncOp = _REDUCE.asyncOp = False
_FIELDS = 5
"""The number of fields in a parcel's header for each server: the step, rows, bags (-1: each row is
a bag), mode, and whether there are weights. A negative first field -n requests parcels of n bytes.
"""


class Together:
    """An exchange of gradients among trainers, each of which then updates its share of the rows.

    All trainers are on the servers' host and write to the servers' memory. They exchange the
    gradients of bags, which are several times smaller than those of rows.

    All parcels have the same size, which fits the largest batch so far. A trainer that needs more
    sends an empty parcel with the size, and all repeat the exchange with larger parcels.

    Args:
        group: The trainers' process group, in the order of their numbers.
        rows: The rows of the whole table; those of every server must be in memory.
    """

    def __init__(self, group: dist.ProcessGroup, rows: Rows) -> None:
        self._group, self._name = group, rows.name
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._memories: list[Memory] = [each for each in rows.memories if each is not None]
        self._bytes_of_row = rows.width * rows.dtype.itemsize
        self._item = rows.dtype.itemsize
        self._head = 8 * _FIELDS * len(self._memories)
        self._failed = torch.zeros(1, dtype=torch.int64)
        self._failures: Any = self._failed.numpy()
        self._make_room(self._head)

    @classmethod
    def of(cls, group: dist.ProcessGroup, rows: Rows, trainer: int) -> Together | None:
        """Return an exchange if all trainers are synchronous and have all rows in memory.

        Otherwise return None, on all trainers.

        All ranks of the group must call it; it blocks until they have.

        Raises:
            UsageError: A trainer's number is not its rank, or the servers have a different number
                of trainers.
        """
        rank, size, terms = dist.get_rank(group), dist.get_world_size(group), rows.terms
        if (trainer, terms.trainers) != (rank, size):
            raise UsageError(
                f"table {rows.name!r}: trainer={trainer} of {terms.trainers} given with a group in "
                f"which this is rank {rank} of {size}: expected the same"
            )
        usable = torch.tensor([int(all(rows.in_memory) and terms.staleness is None)])
        dist.all_reduce(usable, dist.ReduceOp.MIN, group)
        return cls(group, rows) if usable.item() else None

    def step(self, given: Sequence[tuple[Batch, Tensor]]) -> None:
        """Make a step with the mean of all trainers' gradients; block until it is made.

        Args:
            given: For each server, this trainer's batch, of mode "sum" or "mean", and the
                gradients of its bags, of shape (bags, width).

        Raises:
            PhalanxError: A trainer could not update a row, or a collective of the group failed
                (`PeerLost`, `CollectiveTimeout`). Rows may have been updated.
        """
        while (heads := self._exchange(given)) is None:
            pass
        self._failures[0] = 1
        try:
            self._update(heads)
            self._failures[0] = 0
        finally:
            # Also a barrier: no trainer reads a row before all rows are updated.
            self._group.allreduce([self._failed], _REDUCE).wait()
        if failures := int(self._failures[0]):
            raise PhalanxError(
                f"table {self._name!r}: {failures} of {self._size} trainers couldn't update their "
                "rows; their own errors say why"
            )

    def _exchange(self, given: Sequence[tuple[Batch, Tensor]]) -> list[list[int]] | None:
        """Exchange the gradients; return all headers, or None if a parcel was too small."""
        need = self._head + sum(self._sized(batch, outputs) for batch, outputs in given)
        if need > self._parcel.numel():
            self._own_head[0] = -need
        else:
            self._pack(given)
        self._group.allgather([self._parcels], [self._parcel], _GATHER).wait()
        heads: list[list[int]] = self._heads.tolist()
        if (lacking := min(head[0] for head in heads)) < 0:
            self._make_room(-lacking)
            return None
        return heads

    def _sized(self, batch: Batch, outputs: Tensor) -> int:
        begins = 0 if batch.begins is None else 8 * len(batch.begins)
        weights = 0 if batch.weights is None else _whole(self._item * len(batch.rows))
        return 8 * len(batch.rows) + begins + weights + _whole(self._bytes_of_row * len(outputs))

    def _pack(self, given: Sequence[tuple[Batch, Tensor]]) -> None:
        head: list[int] = []
        at = self._parcel.data_ptr() + self._head
        for memory, (batch, outputs) in zip(self._memories, given, strict=True):
            bags = -1 if batch.begins is None else len(batch.begins)
            mode, weighted = MODES[batch.mode], int(batch.weights is not None)
            head += [memory.step + 1, len(batch.rows), bags, mode, weighted]
            for part in (batch.rows, batch.begins, batch.weights, outputs.contiguous()):
                if part is not None:
                    size = part.numel() * part.element_size()
                    ctypes.memmove(at, part.data_ptr(), size)
                    at += _whole(size)
        self._own_head[:] = head

    def _update(self, heads: Sequence[Sequence[int]]) -> None:
        at = [self._all.data_ptr() + n * self._all.shape[1] + self._head for n in range(self._size)]
        share = Share(self._rank, self._size)
        for server, memory in enumerate(self._memories):
            batches = []
            for trainer, head in enumerate(heads):
                fields = head[_FIELDS * server : _FIELDS * (server + 1)]
                batch, at[trainer] = self._unpacked(at[trainer], fields)
                batches.append(batch)
            # Rank 0 counts the step.
            number = heads[0][_FIELDS * server] if self._rank else 0
            memory.update_all(batches, self._size, share, number)

    def _unpacked(self, at: int, fields: Sequence[int]) -> tuple[Addresses, int]:
        """Return the addresses of a batch that begins at `at`, and the address of its end."""
        _, rows, bags, mode, weighted = fields
        begins = at + 8 * rows
        weights = begins + 8 * max(bags, 0)
        outputs = weights + (_whole(self._item * rows) if weighted else 0)
        count = rows if bags < 0 else bags
        parts = begins if bags >= 0 else 0, count, mode, weights if weighted else 0, outputs
        return (at, rows, *parts), outputs + _whole(self._bytes_of_row * count)

    def _make_room(self, size: int) -> None:
        self._all = torch.zeros(self._size, _whole(size), dtype=torch.uint8)
        self._parcels = [*self._all]
        self._parcel = torch.zeros(_whole(size), dtype=torch.uint8)
        numbers: Any = self._all.numpy().view("int64")
        self._heads = numbers[:, : self._head // 8]
        self._own_head: Any = self._parcel.numpy().view("int64")[: self._head // 8]


def _whole(size: int) -> int:
    """Round a size in bytes up to a multiple of 8."""
    return -(-size // 8) * 8
