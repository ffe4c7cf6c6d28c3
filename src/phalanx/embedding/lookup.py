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

from phalanx.embedding.arguments import checked_indices, out_of_range
from phalanx.embedding.gradients import Addresses, Batch, Share
from phalanx.embedding.server import Server, Terms
from phalanx.embedding.sharding import Shards
from phalanx.embedding.table import Table, TableHandle
from phalanx.errors import PeerLost, UsageError
from phalanx.rpc.rref import RRef

__all__ = ["Plan", "Reference", "Rows", "begin"]

_LOG = logging.getLogger(__name__)
_GRACE = 30.0
"""Seconds added to a server's own timeout for trainers, so that the server reports it first."""


class Future(Protocol):
    """The result of an asynchronous call, such as a `torch.futures.Future`."""

    def wait(self) -> Any:
        """Block until the call has returned; return its value or raise its exception."""


class Reference(Protocol):
    """A reference to a server, such as an `RRef`."""

    def rpc_async(self, timeout: float = ...) -> Any:
        """Return a proxy on which each method call returns a future."""


class Memory(Protocol):
    """Rows in memory, with the methods of `Table`."""

    def gather(self, indices: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the rows of these indices."""
        ...

    def pooled(self, batch: Batch) -> Tensor:
        """Return the rows of each bag combined."""
        ...

    def update_all(
        self, batches: Sequence[Addresses], divisor: float, share: Share, number: int
    ) -> None:
        """Make a step, or a part of one, with the gradients of several batches."""
        ...

    @property
    def step(self) -> int:
        """The number of steps made."""
        ...


class _Done:
    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


def begin(
    server: Server | Reference, method: str, *arguments: object, timeout: float | None = None
) -> Future:
    """Start a call of a server's method; a server in this process is called before this returns.

    Args:
        server: The server.
        method: The name of the method.
        arguments: The arguments of the method.
        timeout: The timeout of a call to another process, in seconds; by default that of all calls.
    """
    if isinstance(server, Server):
        value = getattr(server, method)(*arguments)
        return value if isinstance(value, torch.futures.Future) else _Done(value)
    begun = server.begin if isinstance(server, RRef) else server.rpc_async
    proxy = begun() if timeout is None else begun(timeout)
    future: Future = getattr(proxy, method)(*arguments)
    return future


class _Memory:
    """A server's rows, mapped by this process, usable while the server is alive."""

    def __init__(self, handle: TableHandle) -> None:
        self.table = Table.open(handle)
        self._name, self._pid = handle.name, handle.pid
        self._process = os.pidfd_open(handle.pid)
        self._poll = select.poll()
        self._poll.register(self._process, select.POLLIN)

    def gather(self, indices: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the rows of these indices."""
        self._check()
        return self.table.gather(indices, out=out)

    def pooled(self, batch: Batch) -> Tensor:
        """Return the rows of each bag combined."""
        self._check()
        return self.table.pooled(batch)

    def update_all(
        self, batches: Sequence[Addresses], divisor: float, share: Share, number: int
    ) -> None:
        """Make a step, or a part of one, with the gradients of several batches."""
        self._check()
        self.table.update_all(batches, divisor, share, number)

    @property
    def step(self) -> int:
        """The number of steps made."""
        return self.table.step

    def _check(self) -> None:
        # The mapping outlives the server, but no process would update it any more.
        if self._poll.poll(0):
            raise PeerLost(
                f"table {self._name!r}: its server (pid {self._pid}) has ended: start the job "
                "again from its last checkpoint"
            )

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            os.close(self._process)


@dataclass
class Plan:
    """The rows that a batch needs, each once, and their servers."""

    inverse: Tensor
    """The position among the rows of each index of the batch; of the batch's shape."""
    count: int
    """The number of rows."""
    places: list[Tensor | slice]
    """For each server, the positions of the rows that it has."""
    local: list[Tensor]
    """For each server, the local numbers of those rows."""


class Rows:
    """All rows of a table that is split over servers.

    Args:
        shards: The assignment of rows to servers.
        servers: For each server, in that order, a `Server` of this process or a reference to one.
        shared: Whether to read the rows of servers on this host from memory.

    Raises:
        UsageError: The number of servers, or the part of one of them, does not match the split.
    """

    def __init__(
        self, shards: Shards, servers: Sequence[Server | Reference], shared: bool = True
    ) -> None:
        if len(servers) != shards.servers:
            raise UsageError(f"{len(servers)} servers given for a split over {shards.servers}")
        self.shards, self.servers = shards, list(servers)
        asked = [begin(server, "terms") for server in servers]
        found: list[Terms] = [future.wait() for future in asked]
        self.terms = found[0]
        self.name = self.terms.name
        self.width, self.dtype = self.terms.width, self.terms.dtype
        for number, terms in enumerate(found):
            expected = self.terms._replace(rows=shards.count(number))
            if terms != expected:
                raise UsageError(
                    f"table {self.name!r}: server {number} has {terms}, expected {expected}"
                )
        self.memories = [self._memory(server, shared) for server in servers]
        """For each server, the memory from which its rows are read; None: they come by calls."""

    @property
    def in_memory(self) -> list[bool]:
        """For each server, whether its rows are read from memory."""
        return [memory is not None for memory in self.memories]

    @property
    def alone(self) -> Memory | None:
        """The memory of all rows if there is one server and it is read from memory, else None."""
        return self.memories[0] if len(self.memories) == 1 else None

    def _memory(self, server: Server | Reference, shared: bool) -> Memory | None:
        if isinstance(server, Server):
            return server.table
        if not shared or (isinstance(server, RRef) and not server.is_near()):
            return None
        handle = begin(server, "handle").wait()
        try:
            return _Memory(handle)
        except OSError as error:
            _LOG.info(
                "table %r: rows come by calls, since the memory of process %d isn't here (%s)",
                self.name,
                handle.pid,
                error.strerror,
            )
            return None

    def plan(self, indices: Tensor) -> Plan:
        """Determine the rows that a batch needs.

        Raises:
            UsageError: An index is out of range.
        """
        flat = checked_indices(self.name, indices)
        unique, inverse = torch.unique(flat, return_inverse=True)
        for edge in (0, -1) if len(unique) else ():
            if not 0 <= (index := int(unique[edge])) < self.shards.rows:
                raise out_of_range(self.name, index, self.shards.rows)
        if len(self.servers) == 1:
            whole = slice(0, len(unique))
            return Plan(inverse.view(indices.shape), len(unique), [whole], [unique])
        owners, local = self.shards.place(unique)
        places = [_span((owners == server).nonzero()) for server in range(len(self.servers))]
        return Plan(
            inverse.view(indices.shape), len(unique), places, [local[place] for place in places]
        )

    def begin(self, plan: Plan) -> Callable[[], Tensor]:
        """Start to fetch the rows of a plan.

        Returns:
            A function that waits for the rows and returns them, in the plan's order.
        """
        calls = [
            begin(server, "lookup", local) if memory is None and len(local) else None
            for server, memory, local in zip(self.servers, self.memories, plan.local, strict=True)
        ]
        rows = torch.empty(plan.count, self.width, dtype=self.dtype)
        for memory, place, local in zip(self.memories, plan.places, plan.local, strict=True):
            if memory is None or len(local) == 0:
                continue
            if isinstance(place, slice):
                memory.gather(local, out=rows[place])
            else:
                rows[place] = memory.gather(local)

        def wait() -> Tensor:
            for call, place in zip(calls, plan.places, strict=True):
                if call is not None:
                    rows[place] = call.wait()
            return rows

        return wait

    def update(self, plan: Plan, gradients: Tensor, trainer: int) -> list[Future]:
        """Start a step of a trainer on all servers, even those of which the plan has no row."""
        patience = self.terms.timeout + _GRACE
        return [
            begin(server, "begin_update", local, gradients[place], trainer, timeout=patience)
            for server, place, local in zip(self.servers, plan.places, plan.local, strict=True)
        ]


def _span(places: Tensor) -> Tensor | slice:
    """Return ascending positions, as a slice if they are consecutive, which avoids a copy."""
    places = places.view(-1)
    if len(places) == 0:
        return slice(0, 0)
    first, end = int(places[0]), int(places[-1]) + 1
    return slice(first, end) if end - first == len(places) else places
