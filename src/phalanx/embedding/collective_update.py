"""A synchronous step of trainers on the servers' host, made in memory, without a remote call."""

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
from phalanx.embedding.gradients import Batch, BatchAddresses, Share
from phalanx.errors import PhalanxError, UsageError

if TYPE_CHECKING:
    from phalanx.embedding.lookup import LocalTable, ShardedTable

__all__ = ["CollectiveUpdate"]

# Options for the group's own methods: the functions of `torch.distributed` would double the time.
_ALLGATHER_OPTIONS, _ALLREDUCE_OPTIONS = AllgatherOptions(), AllreduceOptions()
_ALLGATHER_OPTIONS.asyncOp = _ALLREDUCE_OPTIONS.asyncOp = False
_HEADER_FIELDS = 5
"""The number of fields in a buffer's header for each server: the step, rows, bags (-1: each row is
a bag), mode, and whether there are weights. A negative first field -n requests buffers of n bytes.
"""


class CollectiveUpdate:
    """An exchange of gradients among trainers, each of which then updates its share of the rows.

    All trainers are on the servers' host and write to the servers' memory. They exchange the
    gradients of bags, which are several times smaller than those of rows.

    All buffers have the same size, which fits the largest batch so far. A trainer that needs more
    sends an empty buffer with the required size, and all repeat the exchange with larger buffers.

    Args:
        group: The trainers' process group, in the order of their numbers.
        table: The whole table; the rows of every server must be mapped by this process.
    """

    def __init__(self, group: dist.ProcessGroup, table: ShardedTable) -> None:
        self._group, self._name = group, table.name
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._local_tables: list[LocalTable] = [
            each for each in table.local_tables if each is not None
        ]
        self._row_size = table.width * table.dtype.itemsize
        self._itemsize = table.dtype.itemsize
        self._header_size = 8 * _HEADER_FIELDS * len(self._local_tables)
        self._failure_count = torch.zeros(1, dtype=torch.int64)
        self._failure_count_view: Any = self._failure_count.numpy()
        self._allocate(self._header_size)

    @classmethod
    def create(
        cls, group: dist.ProcessGroup, table: ShardedTable, trainer: int
    ) -> CollectiveUpdate | None:
        """Return a `CollectiveUpdate` if all trainers are synchronous and have mapped all rows.

        Otherwise return None, on all trainers. All ranks of the group must call it; it blocks until
        they have.

        Raises:
            UsageError: A trainer's number is not its rank, or the servers have a different number
                of trainers.
        """
        rank, size, spec = dist.get_rank(group), dist.get_world_size(group), table.spec
        if (trainer, spec.trainers) != (rank, size):
            raise UsageError(
                f"table {table.name!r}: trainer={trainer} of {spec.trainers} given with a group in "
                f"which this process is rank {rank} of {size}: they must match"
            )
        is_usable = torch.tensor([int(all(table.is_local) and spec.staleness is None)])
        dist.all_reduce(is_usable, dist.ReduceOp.MIN, group)
        return cls(group, table) if is_usable.item() else None

    def step(self, batches: Sequence[tuple[Batch, Tensor]]) -> None:
        """Make a step with the mean of all trainers' gradients; block until it is complete.

        Args:
            batches: For each server, this trainer's batch, of mode "sum" or "mean", and the
                gradients of its bags, of shape (bags, width).

        Raises:
            PhalanxError: A trainer could not update a row, or a collective of the group failed
                (`PeerLost`, `CollectiveTimeout`). Rows may have been updated.
        """
        while (headers := self._exchange(batches)) is None:
            pass
        self._failure_count_view[0] = 1
        try:
            self._update(headers)
            self._failure_count_view[0] = 0
        finally:
            # Also a barrier: no trainer reads a row before all rows are updated.
            self._group.allreduce([self._failure_count], _ALLREDUCE_OPTIONS).wait()
        if failures := int(self._failure_count_view[0]):
            raise PhalanxError(
                f"table {self._name!r}: {failures} of {self._size} trainers could not update their "
                "rows; their own errors give the reason"
            )

    def _exchange(self, batches: Sequence[tuple[Batch, Tensor]]) -> list[list[int]] | None:
        """Exchange the gradients; return all headers, or None if a buffer was too small."""
        size = self._header_size + sum(
            self._encoded_size(batch, gradients) for batch, gradients in batches
        )
        if size > self._send_buffer.numel():
            self._own_header[0] = -size
        else:
            self._pack(batches)
        self._group.allgather(
            [self._receive_buffers], [self._send_buffer], _ALLGATHER_OPTIONS
        ).wait()
        headers: list[list[int]] = self._headers.tolist()
        if (missing := min(header[0] for header in headers)) < 0:
            self._allocate(-missing)
            return None
        return headers

    def _encoded_size(self, batch: Batch, gradients: Tensor) -> int:
        offsets = 0 if batch.offsets is None else 8 * len(batch.offsets)
        weights = 0 if batch.weights is None else _align(self._itemsize * len(batch.rows))
        return 8 * len(batch.rows) + offsets + weights + _align(self._row_size * len(gradients))

    def _pack(self, batches: Sequence[tuple[Batch, Tensor]]) -> None:
        header: list[int] = []
        address = self._send_buffer.data_ptr() + self._header_size
        for local_table, (batch, gradients) in zip(self._local_tables, batches, strict=True):
            bags = -1 if batch.offsets is None else len(batch.offsets)
            mode, weighted = MODES[batch.mode], int(batch.weights is not None)
            header += [local_table.step + 1, len(batch.rows), bags, mode, weighted]
            for part in (batch.rows, batch.offsets, batch.weights, gradients.contiguous()):
                if part is not None:
                    size = part.numel() * part.element_size()
                    ctypes.memmove(address, part.data_ptr(), size)
                    address += _align(size)
        self._own_header[:] = header

    def _update(self, headers: Sequence[Sequence[int]]) -> None:
        addresses = [
            self._received.data_ptr() + n * self._received.shape[1] + self._header_size
            for n in range(self._size)
        ]
        share = Share(self._rank, self._size)
        for server, local_table in enumerate(self._local_tables):
            batches = []
            for trainer, header in enumerate(headers):
                fields = header[_HEADER_FIELDS * server : _HEADER_FIELDS * (server + 1)]
                batch, addresses[trainer] = self._unpack(addresses[trainer], fields)
                batches.append(batch)
            # Rank 0 counts the step.
            step = headers[0][_HEADER_FIELDS * server] if self._rank else 0
            local_table.update_batches(batches, self._size, share, step)

    def _unpack(self, address: int, fields: Sequence[int]) -> tuple[BatchAddresses, int]:
        """Return the addresses of the batch that begins at `address`, and its end."""
        _, rows, bags, mode, weighted = fields
        offsets = address + 8 * rows
        weights = offsets + 8 * max(bags, 0)
        gradients = weights + (_align(self._itemsize * rows) if weighted else 0)
        count = rows if bags < 0 else bags
        parts = offsets if bags >= 0 else 0, count, mode, weights if weighted else 0, gradients
        return (address, rows, *parts), gradients + _align(self._row_size * count)

    def _allocate(self, size: int) -> None:
        self._received = torch.zeros(self._size, _align(size), dtype=torch.uint8)
        self._receive_buffers = [*self._received]
        self._send_buffer = torch.zeros(_align(size), dtype=torch.uint8)
        numbers: Any = self._received.numpy().view("int64")
        self._headers = numbers[:, : self._header_size // 8]
        self._own_header: Any = self._send_buffer.numpy().view("int64")[: self._header_size // 8]


def _align(size: int) -> int:
    """Round a size in bytes up to a multiple of 8."""
    return -(-size // 8) * 8
