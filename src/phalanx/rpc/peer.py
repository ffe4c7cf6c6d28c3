"""Another worker, as seen from this one: its connections, its pending calls and its loss."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from phalanx.errors import CallTimeout, PeerLost, PhalanxError, UsageError
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


class Peers:
    """The workers of a group; those that are lost stay.

    Iteration yields those that are known at its beginning, whichever join meanwhile.

    Attributes:
        learn: In a group that workers may join, a function that adds those that have joined. It is
            called when an unknown worker is looked up.
    """

    def __init__(self) -> None:
        self.learn: Callable[[], None] | None = None
        self._by_id: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}

    def add(self, peer: Peer) -> None:
        """Add a worker; from a lost one of the same name it takes over the name."""
        self._by_id[peer.id] = peer
        self._by_name[peer.info.name] = peer

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_id.values()))

    def __contains__(self, worker: object) -> bool:
        return self.find(worker) is not None

    def __getitem__(self, worker: int) -> Peer:
        peer = self.find(worker)
        if peer is None:
            raise UsageError(f"there is no worker with the id {worker}")
        return peer

    @property
    def may_grow(self) -> bool:
        """True if workers may join the group at any time."""
        return self.learn is not None

    def find(self, worker: object) -> Peer | None:
        """Return the worker with that name or id, or None."""
        known: dict[Any, Peer] = self._by_name if isinstance(worker, str) else self._by_id
        found = known.get(worker)
        # The name of a lost worker may be that of one which has taken its place.
        is_lost = found is not None and found.loss_reason and isinstance(worker, str)
        if self.learn is not None and (found is None or is_lost):
            self.learn()
            found = known.get(worker)
        return found


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
        self.lost_at = math.inf
        """The time of the loss, in monotonic seconds."""
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
        self._closed = self._has_died = False

    def __str__(self) -> str:
        return self._description

    def check(self, description: str) -> None:
        """Raise `PeerLost`, which names the call that was to be made, if the worker is lost."""
        if self.loss_reason:
            raise PeerLost(
                f"{self.loss_reason} before this worker asked for {description}",
                ranks=[self.id],
                operation=description,
            )

    def mark_lost(self, reason: str) -> str:
        """Mark the worker as lost; return the reason, of which the first one counts."""
        if not self.loss_reason:
            self.loss_reason, self.lost_at = reason, time.monotonic()
        if not self._closed:
            self._eventfd.notify()
        self._shut_down_connections()
        return self.loss_reason

    @property
    def has_died(self) -> bool:
        """True if the worker is on this host and dead."""
        return self._has_died or (self.pidfd >= 0 and is_readable(self.pidfd))

    def is_unreachable(self) -> bool:
        """Return whether the worker is known to be lost or is dead."""
        return bool(self.loss_reason) or self.has_died

    def is_ending(self) -> bool:
        """Return whether the worker is dead or has left, or does so in a moment.

        The memory of a process that dies is gone before the process is, and that of a worker that
        leaves may be gone before its message arrives.
        """
        if self.loss_reason:
            return True
        poll = select.poll()
        poll.register(self._eventfd.fileno(), select.POLLIN)
        if self.pidfd >= 0:
            poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(_DRAIN_MILLISECONDS))

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
        """Close all descriptors; connections in use end now, and close when they are given back."""
        if self._closed:
            return
        self._has_died = self.has_died
        self._closed = True
        self._shut_down_connections()
        if self.async_connection is not None:
            self.async_connection.close()
        while self._idle_connections:
            self._idle_connections.pop().close()
        if self.pidfd >= 0:
            pidfd, self.pidfd = self.pidfd, -1
            os.close(pidfd)
        self._eventfd.close()
