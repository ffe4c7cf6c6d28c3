"""Failures of a group that spans hosts: detected on one host, reported identically on all.

Each rank posts a receive of one byte from its counterparts on the next and the previous host. The
byte is never sent, so the receive ends only when the connection is closed. Lost ranks are thereby
detected even while no operation needs them. The rank that detects this breaks the group of its
host. The failure thereby reaches every host, even ranks that wait in memory for a rank that itself
waits for another rank.

The reason why a group broke is shared once with all ranks through the group's store. A rank that
detects a failure reports it before it closes its connections. Peers that find their connections
closed can then look up the reason. The first report wins, so all ranks raise the same error. The
store may be lost with its host, so every request to it has a short limit.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from phalanx import _native
from phalanx.hierarchical.execution import LIVENESS_TAG, ConnectionLost
from phalanx.hierarchical.fingerprint import Fingerprint, Header
from phalanx.topology import Layout, RankRecord
from phalanx.transports import Transfer, Transport, TransportError
from phalanx.transports.store_query import TIMEOUT, StoreLost, query_store

_FAILURE_KEY = "phalanx/broken"
_RETRY_PAUSE = 5.0
"""Seconds without requests after an unanswered one: the link to the store may be severed."""
_REPORT_GRACE = 0.25
"""Seconds to wait for the reason of a closed connection, which another rank may report.

On the host of a dead rank, others know more about its end.
"""
_POLL_INTERVAL = 0.005
EXITED = "*"
"""The value in place of the call site at which a rank left, if its process has exited."""
_MAX_REASON_CHARACTERS = 600
"""The maximum length of a reason that is passed on to the native group, in characters."""
_MIN_CHECK_PAUSE, _MAX_CHECK_PAUSE = 0.25, 8.0
"""Seconds between two checks of a wait for failures reported by other ranks: first and longest."""
_TIMEOUT_GRACE = 0.5
"""Seconds for which a rank, at its timeout, waits for a failure reported by another rank."""


class GroupFailure(NamedTuple):
    """The failure that broke a group, as described by the rank that detected it."""

    code: str
    """The code of the failure, as in a native status."""
    message: str
    reporter: int
    peer: int = -1
    error: int = 0


class SharedGroupState:
    """The state of a group that its ranks share in the store: its failure, and the ranks that left.

    Args:
        store: The group's store. Keys begin with "phalanx/".
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._failure: GroupFailure | None = None
        self._retry_at = 0.0

    def report(self, failure: GroupFailure) -> GroupFailure:
        """Report a failure of the group, and return the failure that was reported first."""
        if self._failure is None:
            text = json.dumps(failure)
            stored = self._query(lambda: self._store.compare_set(_FAILURE_KEY, "", text))
            self._failure = _parse(stored) or failure
        return self._failure

    def find_failure(
        self, grace_seconds: float = _REPORT_GRACE, is_final: Callable[[], bool] = lambda: False
    ) -> GroupFailure | None:
        """Return the failure of the group, or None.

        Args:
            grace_seconds: The longest time to wait for a report.
            is_final: Returns whether no report can come any more, so that the wait ends.
        """
        end = time.monotonic() + grace_seconds
        while self._failure is None:
            is_last = time.monotonic() >= end or is_final()
            self._failure = _parse(self._read(_FAILURE_KEY))
            if self._failure is not None or is_last:
                break
            time.sleep(_POLL_INTERVAL)
        return self._failure

    def record_leave(self, rank: int, site: str) -> None:
        """Record that a rank leaves the group, with the call site.

        The call site is `EXITED` if its process exits normally without having left the group.
        """
        self._query(lambda: self._store.set(_leave_key(rank), site or "-"))

    def leave_site(self, rank: int) -> str | None:
        """Return the call site at which a rank left the group.

        Returns None if the rank has not left, an empty text if the call site is unknown, and
        `EXITED` if its process has exited.
        """
        answer = self._read(_leave_key(rank))
        if answer is None:
            return None
        return answer.decode().removeprefix("-")

    def record_end(self, rank: int) -> None:
        """Record that a rank leaves the group after its failure, so it agrees on no other group."""
        self._query(lambda: self._store.set(_end_key(rank), "-"))

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has left the group, before or after a failure."""
        keys = _leave_key(rank), _end_key(rank)
        return any(self._query(partial(self._store.check, [key])) for key in keys)

    def _read(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none, empty if the store loses it."""
        if not self._query(lambda: self._store.check([key])):
            return None
        return self._query(lambda: self._store.get(key)) or b""

    def _query(self, request: Callable[[], Any]) -> Any:
        """Return the store's answer; None if the store is gone or does not answer in time."""
        if time.monotonic() < self._retry_at:
            return None
        begin = time.monotonic()
        try:
            return query_store(request)
        except StoreLost:
            if time.monotonic() - begin >= TIMEOUT:
                self._retry_at = time.monotonic() + _RETRY_PAUSE
            return None


def _leave_key(rank: int) -> str:
    return f"phalanx/left/{rank}"


def _end_key(rank: int) -> str:
    return f"phalanx/ended/{rank}"


def _parse(text: bytes | None) -> GroupFailure | None:
    return GroupFailure(*json.loads(text)) if text else None


@dataclass(frozen=True)
class GlobalStatus:
    """A native status whose ranks are those of the whole group."""

    code: str
    peer: int
    reporter: int
    error: int
    mine: Fingerprint
    theirs: Fingerprint


class Formatter(Protocol):
    """The texts of failures and operations, as the backend writes them."""

    def explain(self, status: GlobalStatus, timeout: float) -> tuple[str, str]:
        """Return the native code of the failure and the text of its error."""

    def abort_reason(self, failure: GroupFailure) -> str:
        """Return the reason with which to abort this host's group.

        The other ranks of the host interpret it with `explain`.
        """

    def format_operation(self, fingerprint: Fingerprint, site: str) -> str:
        """Return an operation with its call site.

        For example "all_reduce #41 float32[8] SUM at train.py:40".
        """

    def format_site(self, site: str) -> str:
        """Return a text such as " at train.py:77", or an empty one."""


class FailurePropagator:
    """The failure handler of a group that spans hosts.

    It breaks the group in memory, between hosts, and in the store.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        records: The host and process of each rank of the group.
        shared_state: The state of the group that the ranks share through the store.
        transport: The transport that carries bytes between hosts.
        formatter: The texts of failures and operations.
        has_ended: Returns whether a rank of another host is known to have ended.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        records: list[RankRecord],
        shared_state: SharedGroupState,
        transport: Transport,
        formatter: Formatter,
        has_ended: Callable[[int], bool],
    ) -> None:
        self._native = native
        self._layout = layout
        self._records = records
        self._shared_state = shared_state
        self._formatter = formatter
        self._transport = transport
        self._has_ended = has_ended
        self._lock = threading.Lock()
        self._leave_sites: dict[int, str] = {}
        self.is_closing = False
        """True while this rank is leaving the group: closed connections are then no failures."""
        self.failure: GroupFailure | None = None

    def report_status(self, status: _native.Status, timeout: float) -> GroupFailure:
        """Report that the native group of this host is broken, and return the failure.

        Args:
            status: The native status of the failure.
            timeout: The timeout of the operation, in seconds.
        """
        ranks = self._layout.ranks
        global_status = GlobalStatus(
            status.code,
            ranks[status.peer] if status.peer >= 0 else -1,
            ranks[status.reporter] if status.reporter >= 0 else self._layout.rank,
            status.error,
            Fingerprint.from_native(status.mine, ranks),
            Fingerprint.from_native(status.theirs, ranks),
        )
        if self.failure is None and status.code in ("aborted", "interrupted"):
            # It may be the consequence of a failure on another host.
            reported = self._shared_state.find_failure()
            if reported is not None:
                return self._break_group(reported)
        code, message = self._formatter.explain(global_status, timeout)
        failing, peer, error = global_status.reporter, global_status.peer, global_status.error
        return self.report(GroupFailure(code, message, failing, peer, error))

    def report(self, failure: GroupFailure) -> GroupFailure:
        """Break the group, and return the failure that was reported first: this or an earlier."""
        return self._break_group(self.failure or self._shared_state.report(failure))

    def report_connection_lost(self, error: ConnectionLost, operation: str) -> GroupFailure:
        """Report that the connection to a rank is closed while an operation needs it.

        The rank may have died or left, or the connection was closed because of another failure.

        Args:
            error: The rank and the transport's error.
            operation: The operation that needs the connection.
        """
        if self.handle_connection_lost(error):
            if self.is_closing:
                message = "this rank left the group before the operation ended"
                return GroupFailure("aborted", message, self._layout.rank)
            rank, site = self._layout.rank, self._leave_sites.get(error.peer, "")
            peer = self.format_rank(error.peer)
            if site == EXITED:
                message = f"{peer} has exited while rank {rank} is in {operation}"
                return self.report(GroupFailure("peer_lost", message, rank, error.peer))
            message = (
                f"{peer} has left the group (destroy_process_group)"
                f"{self._formatter.format_site(site)} while rank {rank} is in {operation}"
            )
            return self.report(GroupFailure("left", message, rank, error.peer))
        assert self.failure is not None
        return self.failure

    def handle_connection_lost(self, error: ConnectionLost) -> bool:
        """Handle a closed connection to a rank, and return whether it was closed in order.

        It was closed in order if the rank has left the group, or if this rank is leaving. Otherwise
        the group is broken.
        """
        peer = error.peer
        if self.is_closing:
            return True
        if self.failure is None and peer >= 0:
            site = self._shared_state.leave_site(peer)
            if site is not None:
                self._leave_sites[peer] = site
                return True
        reported = self.failure or self._shared_state.find_failure(
            is_final=lambda: self._has_host_ended(peer)
        )
        if reported is None:
            message = (
                f"{self.format_rank(peer)} has died, or its host has: its connection was closed "
                f"({error})"
            )
            reported = self._shared_state.report(
                GroupFailure("peer_lost", message, self._layout.rank, peer)
            )
        self._break_group(reported)
        return False

    def _has_host_ended(self, peer: int) -> bool:
        """Return whether all ranks on the host of `peer` are known to have ended."""
        ranks = self._layout.hosts[self._layout.host_of(peer)] if peer >= 0 else ()
        return bool(ranks) and all(map(self._has_ended, ranks))

    def report_timeout(self, peer: int, operation: str, timeout: float) -> GroupFailure:
        """Report the timeout of an operation in which this rank waited for another host.

        Returns the failure. Blocks for up to half a second for another rank's report.
        """
        # The late rank may itself wait for a rank of its host. Its host times out too and reports
        # which rank that is.
        reported = self.failure or self._shared_state.find_failure(_TIMEOUT_GRACE)
        if reported is not None:
            return self._break_group(reported)
        rank = self._layout.rank
        message = (
            f"rank {rank} waited for {self.format_rank(peer)} in {operation} until the "
            f"timeout of {timeout:g} s on this rank; the state of that rank is unknown"
        )
        return self.report(GroupFailure("timeout", message, rank, peer))

    def create_failure_check(self) -> Callable[[], None]:
        """Return a function that a wait calls repeatedly to check for failures of other ranks.

        It checks the store after growing pauses. Without it, a failure would go undetected if there
        is no connection yet whose end could signal it.
        """
        pause = _MIN_CHECK_PAUSE
        due = time.monotonic() + pause

        def check() -> None:
            nonlocal pause, due
            if self.failure is None and time.monotonic() >= due:
                pause = min(2 * pause, _MAX_CHECK_PAUSE)
                reported = self._shared_state.find_failure(0.0)
                due = time.monotonic() + pause
                if reported is not None:
                    self._break_group(reported)

        return check

    def report_mismatch(self, own: Header, peer: int, theirs: Header) -> GroupFailure:
        """Report that a rank of another host is in a different operation; return the failure."""
        rank = self._layout.rank
        mine, other = self.format_operation(own), self.format_operation(theirs)
        message = f"ranks disagree: rank {rank} is in {mine}, rank {peer} in {other}"
        return self.report(GroupFailure("mismatch", message, rank, peer))

    def format_operation(self, header: Header) -> str:
        """Format an operation with its call site."""
        return self._formatter.format_operation(header.fingerprint, header.site)

    def format_rank(self, rank: int) -> str:
        """Format a rank with its process."""
        if rank < 0:
            return "a rank of another host"
        return f"rank {rank} ({self._records[rank].process})"

    def _break_group(self, failure: GroupFailure) -> GroupFailure:
        with self._lock:
            first, self.failure = self.failure is None, self.failure or failure
        if first:
            if not self._native.closed and self._native.failure() is None:
                self._native.abort(self._formatter.abort_reason(failure)[:_MAX_REASON_CHARACTERS])
            self._transport.abort()
        return self.failure


def watch_counterparts(layout: Layout, transport: Transport, propagator: FailurePropagator) -> None:
    """Break the group if a counterpart of this rank ends without having left the group."""
    for peer in counterparts(layout):
        _watch_peer(peer, transport, propagator)


def counterparts(layout: Layout) -> list[int]:
    """Return the ranks that this rank watches.

    Every rank of a neighbouring host is watched by a rank of this host.
    """
    hosts = len(layout.hosts)
    neighbours = {(layout.host + 1) % hosts, (layout.host - 1) % hosts} - {layout.host}
    peers = set()
    for host in neighbours:
        theirs, ours = layout.hosts[host], len(layout.ranks)
        for number in range(max(ours, len(theirs))):
            if number % ours == layout.local_rank:
                peers.add(theirs[number % len(theirs)])
    return sorted(peers)


def _watch_peer(peer: int, transport: Transport, propagator: FailurePropagator) -> None:
    def handle_end() -> None:
        try:
            transfer.wait(0)
        except TransportError as error:
            propagator.handle_connection_lost(ConnectionLost(peer, error))

    try:
        transfer: Transfer = transport.recv(memoryview(bytearray(1)), peer, LIVENESS_TAG)
    except TransportError as error:
        propagator.handle_connection_lost(ConnectionLost(peer, error))
    else:
        transfer.add_done_callback(handle_end)
