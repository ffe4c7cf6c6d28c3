"""Another worker, as seen from this one: its connections, its pending calls and its loss."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from phalanx.errors import CallTimeout, PeerLost, PhalanxError
from phalanx.rpc.local_connection import LocalConnection, connect, is_readable
from phalanx.rpc.workers import WorkerInfo, WorkerRecord
from phalanx.system.polling import EventFd

if TYPE_CHECKING:
    from phalanx.rpc.remote_connection import RemoteConnection, RemoteContext, RemoteDealer

_EXIT_MILLISECONDS = 1_000
_DRAIN_MILLISECONDS = 200


@dataclass
class PendingFuture:
    """A call whose future has no result yet.

    Attributes:
        future: The future of the result.
        description: A description of the call, for messages.
        keepalive: An object to keep alive until the answer arrives.
        grad: True if the calling thread recorded gradients.
        end: The deadline, in monotonic seconds.
        since: The start, in monotonic seconds.
        worker: The id of the callee.
    """

    future: torch.futures.Future[Any]
    description: str
    keepalive: object
    grad: bool
    end: float
    since: float
    worker: int

    def timeout_error(self) -> CallTimeout:
        """Return the error for a call that has no answer in time."""
        return CallTimeout(
            f"{self.description} took longer than its timeout",
            ranks=[self.worker],
            operation=self.description,
            seconds=self.end - self.since,
        )


class Peer:
    """The connections to a worker and the calls pending on it; it may be this worker.

    Args:
        info: The name and id of the worker.
        record: The record that the worker has published.
        is_local: True if the worker is on this host.
        same_main: True if the worker runs the same main program.
        address: The address at which the worker listens.
    """

    def __init__(
        self, info: WorkerInfo, record: WorkerRecord, is_local: bool, same_main: bool, address: str
    ) -> None:
        self.info, self.record, self.id = info, record, info.id
        self._description = f"worker {info.name!r} (id {info.id}, {record.process})"
        self.is_local, self.same_main, self.address = is_local, same_main, address
        self.nonce = int(record.nonce, 16)
        self.loss_reason = ""
        """The reason for the loss of the worker; empty if it is not lost."""
        self.has_left = False
        """True if the worker has announced that it leaves, so it was reachable."""
        self._eventfd = EventFd()
        self.pidfd = -1
        """A descriptor that is readable once the worker is dead; -1 if it is on another host."""
        if is_local:
            try:
                self.pidfd = os.pidfd_open(record.pid)
            except ProcessLookupError:
                self.pidfd = os.eventfd(1)  # readable from the start
        self.pending: dict[int, PendingFuture] = {}
        self.lock = threading.Lock()
        self.async_connection: LocalConnection | RemoteDealer | None = None
        self._idle_connections: deque[LocalConnection | RemoteConnection] = deque()
        self._connections: WeakSet[LocalConnection] = WeakSet()
        self._connections_lock = threading.Lock()
        self._closed = False

    def __str__(self) -> str:
        return self._description

    def check(self) -> None:
        """Raise `PeerLost` if the worker is lost."""
        if self.loss_reason:
            raise PeerLost(self.loss_reason, ranks=[self.id])

    def mark_lost(self, reason: str) -> str:
        """Mark the worker as lost; return the reason, of which the first one counts."""
        self.loss_reason = self.loss_reason or reason
        self._eventfd.notify()
        self._shut_down_connections()
        return self.loss_reason

    @property
    def has_died(self) -> bool:
        """True if the worker is on this host and dead."""
        return self.is_local and is_readable(self.pidfd)

    def is_unreachable(self) -> bool:
        """Return whether the worker is known to be lost or is dead."""
        return bool(self.loss_reason) or self.has_died

    def is_dying(self) -> bool:
        """Return whether the worker is dead or dies in a moment.

        The memory of a process that dies is gone before the process is.
        """
        return self.is_local and is_readable(self.pidfd, _DRAIN_MILLISECONDS)

    def find_loss_reason(self) -> str:
        """Return the reason why a connection to the worker has ended. May block for a moment."""
        poll = select.poll()
        # A worker that leaves announces that; the message may still be on its way.
        poll.register(self._eventfd.fileno(), select.POLLIN)
        if not self.is_local:
            poll.poll(_DRAIN_MILLISECONDS)
            reason = "is lost: it died, or cannot be reached any more"
            return self.loss_reason or f"{self} {reason}"
        # The connections of a process end a moment before the process.
        poll.register(self.pidfd, select.POLLIN)
        poll.poll(_EXIT_MILLISECONDS)
        if self.has_died and not self.loss_reason:
            poll.unregister(self.pidfd)
            poll.poll(_DRAIN_MILLISECONDS)
        return self.loss_reason or f"{self} {'died' if self.has_died else 'left RPC'}"

    def connection_error(self, description: str, error: PhalanxError) -> PhalanxError:
        """Return the error for a call whose connection could not be made."""
        return error.replace(
            f"{description}: cannot connect to {self}: {error}",
            ranks=(self.id,),
            operation=description,
        )

    def take_connection(
        self, key: bytes, remote_context: RemoteContext | None, end: float, max_wait: float
    ) -> LocalConnection | RemoteConnection:
        """Return a connection for exclusive use until it is given back; see `connect`.

        Raises:
            OSError: The worker no longer listens.
            PhalanxError: Connecting failed; `CallTimeout` if it takes longer than until `end`.
        """
        try:
            return self._idle_connections.pop()
        except IndexError:
            pass
        if remote_context is None or self.is_local:
            connection = connect(key, self.address, end, max_wait)
            with self._connections_lock:
                self._connections.add(connection)
            return connection
        from phalanx.rpc.remote_connection import RemoteConnection

        return RemoteConnection(remote_context, self.address, self._eventfd.fileno())

    def return_connection(self, connection: LocalConnection | RemoteConnection) -> None:
        """Make a connection available to other calls."""
        if self._closed:
            connection.close()
        else:
            self._idle_connections.append(connection)

    def _shut_down_connections(self) -> None:
        """Shut down all streams, so that no thread waits on one any longer.

        Processes that a dead worker has forked may still hold the worker's ends.
        """
        with self._connections_lock:
            connections = list(self._connections)
        if isinstance(self.async_connection, LocalConnection):
            connections.append(self.async_connection)
        for connection in connections:
            connection.shut_down()

    def close(self) -> None:
        """Close all connections; those in use end now, and close when they are given back."""
        self._closed = True
        self._shut_down_connections()
        if self.async_connection is not None:
            self.async_connection.close()
        while self._idle_connections:
            self._idle_connections.pop().close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
