"""Failures of a group that spans hosts: found on one host, reported identically on all."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from phalanx.hierarchical.fingerprint import Fingerprint
from phalanx.hierarchical.group_failure import ENDED, Story, Told

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx import _native
    from phalanx.hierarchical.fingerprint import Header
    from phalanx.hierarchical.transfers import Gone, Late
    from phalanx.topology import Layout, Place
    from phalanx.transports import Transport

__all__ = ["Failing", "Seen", "Words"]

_MOST_WHY = 600
"""Most characters of a reason that are passed on to the native group."""
_FIRST_LOOK, _LONGEST_LOOK = 0.25, 8.0
"""Seconds between two checks of a wait for failures reported by other ranks: first and longest."""
_OTHERS_FIRST = 0.5
"""Seconds for which a rank, at its timeout, waits for a failure reported by another rank."""


@dataclass(frozen=True)
class Seen:
    """A native status whose ranks are those of the whole group."""

    code: str
    peer: int
    reporter: int
    error: int
    mine: Fingerprint
    theirs: Fingerprint


class Words(Protocol):
    """The backend's wording of failures and operations."""

    def explained(self, status: Seen, timeout: float) -> tuple[str, str]:
        """Return the kind of the failure, as a native code, and a sentence with its reason."""

    def reason(self, told: Told) -> str:
        """Return the reason with which to abort this host's group.

        The other ranks of the host interpret it with `explained`.
        """

    def operation(self, fingerprint: Fingerprint, site: str) -> str:
        """Return an operation with its call site.

        For example "all_reduce #41 float32[8] SUM at train.py:40".
        """

    def ending(self, site: str) -> str:
        """Return a text such as " at train.py:77", or an empty one."""


class Failing:
    """The failure handler of a group that spans hosts.

    It breaks the group in memory, between hosts, and in the store.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        places: The host and process of each rank of the group.
        story: The failure that the ranks share through the store.
        transport: The transport that carries bytes between hosts.
        words: The backend's wording.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        places: list[Place],
        story: Story,
        transport: Transport,
        words: Words,
    ) -> None:
        self._native = native
        self._layout = layout
        self._places = places
        self._story = story
        self._words = words
        self._transport = transport
        self._lock = threading.Lock()
        self._left: dict[int, str] = {}
        self.closing = False
        """True while this rank is leaving the group: its closed connections are then no failure."""
        self.told: Told | None = None

    def seen(self, status: _native.Status, timeout: float) -> Told:
        """Report that the native group of this host is broken, and return the failure.

        Args:
            status: The native status of the failure.
            timeout: The timeout of the operation, in seconds.
        """
        ranks = self._layout.ranks
        named = Seen(
            status.code,
            ranks[status.peer] if status.peer >= 0 else -1,
            ranks[status.reporter] if status.reporter >= 0 else self._layout.rank,
            status.error,
            Fingerprint.of(status.mine, ranks),
            Fingerprint.of(status.theirs, ranks),
        )
        if self.told is None and status.code in ("aborted", "interrupted"):
            # It may be the consequence of a failure on another host.
            heard = self._story.hear()
            if heard is not None:
                return self._break(heard)
        code, words = self._words.explained(named, timeout)
        return self.tell(Told(code, words, named.reporter, named.peer, named.error))

    def tell(self, told: Told) -> Told:
        """Break the group, and return the failure that was reported first: this or an earlier."""
        return self._break(self.told or self._story.tell(told))

    def gone(self, gone: Gone, doing: str) -> Told:
        """Report that the connection to a rank is closed while an operation needs it.

        The rank may have died or left, or the connection was closed because of another failure.

        Args:
            gone: The rank and the transport's error.
            doing: The operation that needs the connection.
        """
        if self.lost(gone):
            if self.closing:
                words = "this rank has left the group before the operation ended"
                return Told("aborted", words, self._layout.rank)
            rank, site = self._layout.rank, self._left.get(gone.peer, "")
            if site == ENDED:
                words = f"{self.name(gone.peer)} has ended while rank {rank} is in {doing}"
                return self.tell(Told("peer_lost", words, rank, gone.peer))
            words = (
                f"{self.name(gone.peer)} has left the group (destroy_process_group)"
                f"{self._words.ending(site)} while rank {rank} is in {doing}"
            )
            return self.tell(Told("left", words, rank, gone.peer))
        assert self.told is not None
        return self.told

    def lost(self, gone: Gone) -> bool:
        """Report that the connection to a rank is closed, and return whether that is in order.

        It is in order if the rank has left the group, or if this rank is leaving. Otherwise the
        group is broken.
        """
        peer = gone.peer
        if self.closing:
            return True
        if self.told is None and peer >= 0:
            site = self._story.left(peer)
            if site is not None:
                self._left[peer] = site
                return True
        heard = self.told or self._story.hear()
        if heard is None:
            words = f"{self.name(peer)} has died, or its host: its connection was closed ({gone})"
            heard = self._story.tell(Told("peer_lost", words, self._layout.rank, peer))
        self._break(heard)
        return False

    def late(self, late: Late, doing: str, timeout: float) -> Told:
        """Report the timeout of an operation in which this rank waited for another host.

        Returns the failure. Blocks for up to half a second for another rank's report.
        """
        # The late rank may itself wait for a rank of its host; its host times out too and knows.
        end = time.monotonic() + _OTHERS_FIRST
        heard = self.told or self._story.hear()
        while heard is None and time.monotonic() < end:
            heard = self._story.hear()
        if heard is not None:
            return self._break(heard)
        rank = self._layout.rank
        words = (
            f"rank {rank} waited for {self.name(late.peer)} in {doing} until the timeout of "
            f"{timeout:g} s on this rank; nothing is known of what that rank does"
        )
        return self.tell(Told("timeout", words, rank, late.peer))

    def looking(self) -> Callable[[], None]:
        """Return a function that one wait calls repeatedly to check for failures of other ranks.

        It asks the store after growing pauses. Without it a failure would stay unnoticed if there
        is no connection yet whose end could signal it.
        """
        pause = _FIRST_LOOK
        due = time.monotonic() + pause

        def look() -> None:
            nonlocal pause, due
            if self.told is None and time.monotonic() >= due:
                pause = min(2 * pause, _LONGEST_LOOK)
                heard = self._story.peek()
                due = time.monotonic() + pause
                if heard is not None:
                    self._break(heard)

        return look

    def differs(self, own: Header, peer: int, theirs: Header) -> Told:
        """Report that a rank of another host is in a different operation; return the failure."""
        rank = self._layout.rank
        mine = self._words.operation(own.fingerprint, own.site)
        other = self._words.operation(theirs.fingerprint, theirs.site)
        words = f"ranks disagree: rank {rank} is in {mine}, rank {peer} in {other}"
        return self.tell(Told("mismatch", words, rank, peer))

    def operation(self, header: Header) -> str:
        """Return the text for an operation with its call site."""
        return self._words.operation(header.fingerprint, header.site)

    def name(self, rank: int) -> str:
        """Return the text for a rank with its process."""
        if rank < 0:
            return "a rank of another host"
        place = self._places[rank]
        return f"rank {rank} ({place.process})"

    def _break(self, told: Told) -> Told:
        with self._lock:
            first, self.told = self.told is None, self.told or told
        if first:
            if not self._native.closed and self._native.failure() is None:
                self._native.abort(self._words.reason(told)[:_MOST_WHY])
            self._transport.abort()
        return self.told
