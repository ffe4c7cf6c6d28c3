"""Failures of a group that spans hosts: detected on one host, reported identically on all."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from phalanx.hierarchical.fingerprint import Fingerprint
from phalanx.hierarchical.group_failure import EXITED, GroupFailure, SharedGroupState

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx import _native
    from phalanx.hierarchical.fingerprint import Header
    from phalanx.hierarchical.transfers import ConnectionLost, DeadlineExceeded
    from phalanx.topology import Layout, RankRecord
    from phalanx.transports import Transport

__all__ = ["FailurePropagator", "Formatter", "GlobalStatus"]

_MAX_REASON_CHARACTERS = 600
"""The maximum length of a reason that is passed on to the native group, in characters."""
_MIN_CHECK_PAUSE, _MAX_CHECK_PAUSE = 0.25, 8.0
"""Seconds between two checks of a wait for failures reported by other ranks: first and longest."""
_TIMEOUT_GRACE = 0.5
"""Seconds for which a rank, at its timeout, waits for a failure reported by another rank."""


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
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        records: list[RankRecord],
        shared_state: SharedGroupState,
        transport: Transport,
        formatter: Formatter,
    ) -> None:
        self._native = native
        self._layout = layout
        self._records = records
        self._shared_state = shared_state
        self._formatter = formatter
        self._transport = transport
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
            reported = self._shared_state.wait_for_failure()
            if reported is not None:
                return self._break_group(reported)
        code, message = self._formatter.explain(global_status, timeout)
        return self.report(
            GroupFailure(
                code,
                message,
                global_status.reporter,
                global_status.peer,
                global_status.error,
            )
        )

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
        reported = self.failure or self._shared_state.wait_for_failure()
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

    def report_timeout(
        self, error: DeadlineExceeded, operation: str, timeout: float
    ) -> GroupFailure:
        """Report the timeout of an operation in which this rank waited for another host.

        Returns the failure. Blocks for up to half a second for another rank's report.
        """
        # The late rank may itself wait for a rank of its host. Its host times out too and reports
        # which rank that is.
        end = time.monotonic() + _TIMEOUT_GRACE
        reported = self.failure or self._shared_state.wait_for_failure()
        while reported is None and time.monotonic() < end:
            reported = self._shared_state.wait_for_failure()
        if reported is not None:
            return self._break_group(reported)
        rank = self._layout.rank
        message = (
            f"rank {rank} waited for {self.format_rank(error.peer)} in {operation} until the "
            f"timeout of {timeout:g} s on this rank; the state of that rank is unknown"
        )
        return self.report(GroupFailure("timeout", message, rank, error.peer))

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
                reported = self._shared_state.check_failure()
                due = time.monotonic() + pause
                if reported is not None:
                    self._break_group(reported)

        return check

    def report_mismatch(self, own: Header, peer: int, theirs: Header) -> GroupFailure:
        """Report that a rank of another host is in a different operation; return the failure."""
        rank = self._layout.rank
        mine = self._formatter.format_operation(own.fingerprint, own.site)
        other = self._formatter.format_operation(theirs.fingerprint, theirs.site)
        message = f"ranks disagree: rank {rank} is in {mine}, rank {peer} in {other}"
        return self.report(GroupFailure("mismatch", message, rank, peer))

    def format_operation(self, header: Header) -> str:
        """Format an operation with its call site."""
        return self._formatter.format_operation(header.fingerprint, header.site)

    def format_rank(self, rank: int) -> str:
        """Format a rank with its process."""
        if rank < 0:
            return "a rank of another host"
        record = self._records[rank]
        return f"rank {rank} ({record.process})"

    def _break_group(self, failure: GroupFailure) -> GroupFailure:
        with self._lock:
            first, self.failure = self.failure is None, self.failure or failure
        if first:
            if not self._native.closed and self._native.failure() is None:
                self._native.abort(self._formatter.abort_reason(failure)[:_MAX_REASON_CHARACTERS])
            self._transport.abort()
        return self.failure
