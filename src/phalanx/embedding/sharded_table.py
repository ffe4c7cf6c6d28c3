"""A table split over servers, seen from a trainer: lookups and updates, by calls or in memory."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import secrets
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
)

from phalanx import _native
from phalanx.embedding.batch import (
    MODES,
    WHOLE,
    Batch,
    BatchAddresses,
    Share,
    index_error,
    prepare_indices,
)
from phalanx.embedding.replicated_server import ReplicatedServer
from phalanx.embedding.server import EmbeddingServer, TableSpec
from phalanx.embedding.sharding import Sharding
from phalanx.embedding.table import EmbeddingTable, TableHandle
from phalanx.errors import PeerLost, PhalanxError, UsageError
from phalanx.rpc.rref import RRef

_log = logging.getLogger("phalanx")
_GRACE_SECONDS = 30.0
"""Added to the server's own timeout for trainers, so that the server reports it first."""

# Options for the group's own methods: the functions of `torch.distributed` would double the time.
_ALLGATHER_OPTIONS, _ALLREDUCE_OPTIONS = AllgatherOptions(), AllreduceOptions()
_ALLGATHER_OPTIONS.asyncOp = _ALLREDUCE_OPTIONS.asyncOp = False
_HEADER_FIELDS = 5
"""The number of fields in a buffer's header for each server: the step, rows, bags (-1: each row is
a bag), mode, and whether there are weights. A negative first field -n requests buffers of n bytes.
"""


class Future(Protocol):
    """The result of an asynchronous call, such as a `torch.futures.Future`."""

    def wait(self) -> Any:
        """Block until the call has returned; return its value or raise its exception."""


class ServerReference(Protocol):
    """A reference to a server, such as an `RRef`."""

    def rpc_async(self, timeout: float = ...) -> Any:
        """Return a proxy on which each method call returns a future."""


class _CompletedFuture:
    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


def start_call(
    server: EmbeddingServer | ServerReference | ReplicatedServer,
    method: str,
    *arguments: object,
    timeout: float | None = None,
) -> Future:
    """Start a call of a server's method; a server in this process is called before this returns.

    Args:
        server: The server.
        method: The name of the method.
        arguments: The arguments of the method.
        timeout: The timeout of a call to another process, in seconds; by default that of the agent.
    """
    if isinstance(server, EmbeddingServer):
        value = getattr(server, method)(*arguments)
        return value if isinstance(value, torch.futures.Future) else _CompletedFuture(value)
    if isinstance(server, ReplicatedServer):
        return server.start_call(method, *arguments, timeout=timeout)
    make_proxy = server.begin if isinstance(server, RRef) else server.rpc_async
    proxy = make_proxy() if timeout is None else make_proxy(timeout)
    future: Future = getattr(proxy, method)(*arguments)
    return future


class _MappedTable(EmbeddingTable):
    """A server's rows, mapped by this process, usable while the server is alive."""

    def _initialize(self, core: _native.Rows, handle: TableHandle) -> None:
        super()._initialize(core, handle)
        self._process = os.pidfd_open(handle.pid)
        self._poll = select.poll()
        self._poll.register(self._process, select.POLLIN)

    def gather(self, indices: Tensor, *, out: Tensor | None = None) -> Tensor:
        self._check()
        return super().gather(indices, out=out)

    def pool_batch(self, batch: Batch) -> Tensor:
        self._check()
        return super().pool_batch(batch)

    def update_batches(
        self,
        batches: Sequence[BatchAddresses],
        divisor: float = 1.0,
        share: Share = WHOLE,
        step: int = 0,
    ) -> None:
        self._check()
        super().update_batches(batches, divisor, share, step)

    def _check(self) -> None:
        # The mapping outlives the server, but nothing would update it any more.
        if self._poll.poll(0):
            raise PeerLost(
                f"table {self.name!r}: its server (pid {self.handle.pid}) has exited: restart the "
                "job from its last checkpoint"
            )

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            os.close(self._process)


@dataclass
class LookupPlan:
    """The unique rows of a batch and their servers."""

    inverse: Tensor
    """For each index of the batch, the position of its row; has the batch's shape."""
    count: int
    """The number of rows."""
    positions: list[Tensor | slice]
    """For each server, the positions of its rows."""
    local_indices: list[Tensor]
    """For each server, the indices of those rows on it."""


class ShardedTable:
    """A table whose rows are split over servers, seen from a trainer.

    Args:
        sharding: The assignment of rows to servers.
        servers: For each server, in that order, an `EmbeddingServer` of this process or a reference
            to one.
        use_shared_memory: Whether to read the rows of servers on this host from memory.

    Raises:
        UsageError: The number of servers, or the part of one of them, does not match the sharding.
    """

    def __init__(
        self,
        sharding: Sharding,
        servers: Sequence[EmbeddingServer | ServerReference | ReplicatedServer],
        use_shared_memory: bool = True,
    ) -> None:
        if len(servers) != sharding.servers:
            raise UsageError(f"{len(servers)} servers given for a sharding over {sharding.servers}")
        self.sharding, self.servers = sharding, list(servers)
        futures = [start_call(server, "spec") for server in servers]
        specs: list[TableSpec] = [future.wait() for future in futures]
        self.spec = specs[0]
        self.name = self.spec.name
        self.width, self.dtype = self.spec.width, self.spec.dtype
        for number, spec in enumerate(specs):
            expected = self.spec._replace(rows=sharding.count_rows(number))
            if spec != expected:
                raise UsageError(
                    f"table {self.name!r}: server {number} has {spec}, expected {expected}"
                )
        self._use_shared_memory = use_shared_memory
        self._tokens = itertools.count(secrets.randbits(62) + 1)
        self.local_tables = [self._open_local_table(server) for server in servers]
        """For each server, the table in memory; None: its rows are fetched by calls."""
        self._opened = [self._current(number) for number in range(len(servers))]
        """The servers to which these tables belong."""

    @property
    def is_replicated(self) -> bool:
        """True if each part is on two servers."""
        return any(isinstance(server, ReplicatedServer) for server in self.servers)

    @property
    def is_local(self) -> list[bool]:
        """For each server, whether its rows are read from memory."""
        return [local_table is not None for local_table in self.local_tables]

    @property
    def only_local_table(self) -> EmbeddingTable | None:
        """The table in memory if it has all rows, that is, if there is one server; else None."""
        is_only = len(self.local_tables) == 1 and not self.is_replicated
        return self.local_tables[0] if is_only else None

    def _current(self, number: int) -> object:
        server = self.servers[number]
        return server.current if isinstance(server, ReplicatedServer) else server

    def _refresh(self, number: int) -> None:
        """Open the table of the server that has taken the place of the former one."""
        if (current := self._current(number)) is not self._opened[number]:
            self._opened[number] = current
            self.local_tables[number] = self._open_local_table(self.servers[number])

    def _open_local_table(
        self, server: EmbeddingServer | ServerReference | ReplicatedServer
    ) -> EmbeddingTable | None:
        if isinstance(server, EmbeddingServer):
            return server.table
        current = server.current if isinstance(server, ReplicatedServer) else server
        is_remote = isinstance(current, RRef) and not current.is_on_this_host()
        if not self._use_shared_memory or is_remote:
            return None
        handle = start_call(server, "handle").wait()
        try:
            return _MappedTable.open(handle)
        except OSError as error:
            _log.info(
                "table %r: fetching rows by calls, because the memory of process %d cannot be "
                "mapped (%s)",
                self.name,
                handle.pid,
                error.strerror,
            )
            return None

    def plan(self, indices: Tensor) -> LookupPlan:
        """Determine the unique rows of a batch and their servers.

        Raises:
            UsageError: An index is out of range.
        """
        flat = prepare_indices(self.name, indices)
        unique, inverse = torch.unique(flat, return_inverse=True)
        for extreme in (0, -1) if len(unique) else ():
            if not 0 <= (index := int(unique[extreme])) < self.sharding.rows:
                raise index_error(self.name, index, self.sharding.rows)
        if len(self.servers) == 1:
            everything = slice(0, len(unique))
            return LookupPlan(inverse.view(indices.shape), len(unique), [everything], [unique])
        owners, local = self.sharding.locate(unique)
        positions = [_as_slice((owners == server).nonzero()) for server in range(len(self.servers))]
        return LookupPlan(
            inverse.view(indices.shape),
            len(unique),
            positions,
            [local[position] for position in positions],
        )

    def start_fetch(self, plan: LookupPlan) -> Callable[[], Tensor]:
        """Start fetching the rows of a plan.

        Returns:
            A function that waits for the rows and returns them, in the plan's order.
        """
        for number in range(len(self.servers)):
            self._refresh(number)
        calls = [
            start_call(server, "lookup", local) if local_table is None and len(local) else None
            for server, local_table, local in zip(
                self.servers, self.local_tables, plan.local_indices, strict=True
            )
        ]
        rows = torch.empty(plan.count, self.width, dtype=self.dtype, device="cpu")
        for number, (position, local) in enumerate(
            zip(plan.positions, plan.local_indices, strict=True)
        ):
            if calls[number] is None and len(local):
                calls[number] = self._gather(number, local, rows, position)

        def wait() -> Tensor:
            for call, position in zip(calls, plan.positions, strict=True):
                if call is not None:
                    rows[position] = call.wait()
            return rows

        return wait

    def _gather(
        self, number: int, local: Tensor, rows: Tensor, position: Tensor | slice
    ) -> Future | None:
        """Read rows of a server from memory; return a call for them if the server was replaced."""
        server, table = self.servers[number], self.local_tables[number]
        assert table is not None  # the caller has checked
        try:
            if isinstance(position, slice):
                table.gather(local, out=rows[position])
            else:
                rows[position] = table.gather(local)
        except PeerLost:
            if not isinstance(server, ReplicatedServer):
                raise
            server.replace(server.current)
            self._refresh(number)
            return start_call(server, "lookup", local)
        return None

    def update(self, plan: LookupPlan, gradients: Tensor, trainer: int) -> list[Future]:
        """Start a step of a trainer on all servers, even those without a row in the plan."""
        timeout = self.spec.timeout + _GRACE_SECONDS
        token = next(self._tokens)
        return [
            start_call(
                server, "begin_update", local, gradients[position], trainer, token, timeout=timeout
            )
            for server, position, local in zip(
                self.servers, plan.positions, plan.local_indices, strict=True
            )
        ]


def _as_slice(positions: Tensor) -> Tensor | slice:
    """Return ascending positions, as a slice if they are consecutive, which avoids a copy."""
    positions = positions.view(-1)
    if len(positions) == 0:
        return slice(0, 0)
    first, end = int(positions[0]), int(positions[-1]) + 1
    return slice(first, end) if end - first == len(positions) else positions


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
        self._local_tables: list[EmbeddingTable] = [
            each for each in table.local_tables if each is not None
        ]
        self._row_size = table.width * table.dtype.itemsize
        self._itemsize = table.dtype.itemsize
        self._header_size = 8 * _HEADER_FIELDS * len(self._local_tables)
        self._failure_count = torch.zeros(1, dtype=torch.int64, device="cpu")
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
        may_write = all(table.is_local) and spec.staleness is None and not table.is_replicated
        is_usable = torch.tensor([int(may_write)], device="cpu")
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
        for server, local_table in enumerate(self._local_tables):
            batches = []
            for trainer, header in enumerate(headers):
                fields = header[_HEADER_FIELDS * server : _HEADER_FIELDS * (server + 1)]
                batch, addresses[trainer] = self._unpack(addresses[trainer], fields)
                batches.append(batch)
            # Rank 0 counts the step.
            step = headers[0][_HEADER_FIELDS * server] if self._rank else 0
            local_table.update_batches(batches, self._size, (self._rank, self._size), step)

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
        self._received = torch.zeros(self._size, _align(size), dtype=torch.uint8, device="cpu")
        self._receive_buffers = [*self._received]
        self._send_buffer = torch.zeros(_align(size), dtype=torch.uint8, device="cpu")
        numbers: Any = self._received.numpy().view("int64")
        self._headers = numbers[:, : self._header_size // 8]
        self._own_header: Any = self._send_buffer.numpy().view("int64")[: self._header_size // 8]


def _align(size: int) -> int:
    """Round a size in bytes up to a multiple of 8."""
    return -(-size // 8) * 8
