"""Lookup of a batch's rows, each fetched once, by calls to servers or from this host's memory."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.embedding.arguments import index_error, prepare_indices
from phalanx.embedding.gradients import Batch, BatchAddresses, Share
from phalanx.embedding.server import EmbeddingServer, TableSpec
from phalanx.embedding.sharding import Sharding
from phalanx.embedding.table import EmbeddingTable, TableHandle
from phalanx.errors import PeerLost, UsageError
from phalanx.rpc.rref import RRef

__all__ = ["LocalTable", "LookupPlan", "ServerReference", "ShardedTable", "start_call"]

_LOG = logging.getLogger(__name__)
_GRACE_SECONDS = 30.0
"""Added to the server's own timeout for trainers, so that the server reports it first."""


class Future(Protocol):
    """The result of an asynchronous call, such as a `torch.futures.Future`."""

    def wait(self) -> Any:
        """Block until the call has returned; return its value or raise its exception."""


class ServerReference(Protocol):
    """A reference to a server, such as an `RRef`."""

    def rpc_async(self, timeout: float = ...) -> Any:
        """Return a proxy on which each method call returns a future."""


class LocalTable(Protocol):
    """Rows in this process's memory, with the methods of `EmbeddingTable`."""

    def gather(self, indices: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the rows of these indices."""
        ...

    def pool_batch(self, batch: Batch) -> Tensor:
        """Combine the rows of each bag."""
        ...

    def update_batches(
        self, batches: Sequence[BatchAddresses], divisor: float, share: Share, step: int
    ) -> None:
        """Make a step, or a part of one, with the gradients of several batches."""
        ...

    @property
    def step(self) -> int:
        """The number of steps made."""
        ...


class _CompletedFuture:
    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


def start_call(
    server: EmbeddingServer | ServerReference,
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
    make_proxy = server.begin if isinstance(server, RRef) else server.rpc_async
    proxy = make_proxy() if timeout is None else make_proxy(timeout)
    future: Future = getattr(proxy, method)(*arguments)
    return future


class _MappedTable:
    """A server's rows, mapped by this process, usable while the server is alive."""

    def __init__(self, handle: TableHandle) -> None:
        self.table = EmbeddingTable.open(handle)
        self._name, self._pid = handle.name, handle.pid
        self._process = os.pidfd_open(handle.pid)
        self._poll = select.poll()
        self._poll.register(self._process, select.POLLIN)

    def gather(self, indices: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the rows of these indices."""
        self._check()
        return self.table.gather(indices, out=out)

    def pool_batch(self, batch: Batch) -> Tensor:
        """Combine the rows of each bag."""
        self._check()
        return self.table.pool_batch(batch)

    def update_batches(
        self, batches: Sequence[BatchAddresses], divisor: float, share: Share, step: int
    ) -> None:
        """Make a step, or a part of one, with the gradients of several batches."""
        self._check()
        self.table.update_batches(batches, divisor, share, step)

    @property
    def step(self) -> int:
        """The number of steps made."""
        return self.table.step

    def _check(self) -> None:
        # The mapping outlives the server, but nothing would update it any more.
        if self._poll.poll(0):
            raise PeerLost(
                f"table {self._name!r}: its server (pid {self._pid}) has exited: restart the job "
                "from its last checkpoint"
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
        servers: Sequence[EmbeddingServer | ServerReference],
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
        self.local_tables = [
            self._open_local_table(server, use_shared_memory) for server in servers
        ]
        """For each server, the table in memory; None: its rows are fetched by calls."""

    @property
    def is_local(self) -> list[bool]:
        """For each server, whether its rows are read from memory."""
        return [local_table is not None for local_table in self.local_tables]

    @property
    def only_local_table(self) -> LocalTable | None:
        """The table in memory if it has all rows, that is, if there is one server; else None."""
        return self.local_tables[0] if len(self.local_tables) == 1 else None

    def _open_local_table(
        self, server: EmbeddingServer | ServerReference, use_shared_memory: bool
    ) -> LocalTable | None:
        if isinstance(server, EmbeddingServer):
            return server.table
        if not use_shared_memory or (isinstance(server, RRef) and not server.is_on_this_host()):
            return None
        handle = start_call(server, "handle").wait()
        try:
            return _MappedTable(handle)
        except OSError as error:
            _LOG.info(
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
        calls = [
            start_call(server, "lookup", local) if local_table is None and len(local) else None
            for server, local_table, local in zip(
                self.servers, self.local_tables, plan.local_indices, strict=True
            )
        ]
        rows = torch.empty(plan.count, self.width, dtype=self.dtype)
        for local_table, position, local in zip(
            self.local_tables, plan.positions, plan.local_indices, strict=True
        ):
            if local_table is None or len(local) == 0:
                continue
            if isinstance(position, slice):
                local_table.gather(local, out=rows[position])
            else:
                rows[position] = local_table.gather(local)

        def wait() -> Tensor:
            for call, position in zip(calls, plan.positions, strict=True):
                if call is not None:
                    rows[position] = call.wait()
            return rows

        return wait

    def update(self, plan: LookupPlan, gradients: Tensor, trainer: int) -> list[Future]:
        """Start a step of a trainer on all servers, even those without a row in the plan."""
        timeout = self.spec.timeout + _GRACE_SECONDS
        return [
            start_call(server, "begin_update", local, gradients[position], trainer, timeout=timeout)
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
