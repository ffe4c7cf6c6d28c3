"""What goes wrong in a group that spans hosts: found on one of them, said the same on all."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from phalanx.hosts.fingerprint import Fingerprint
from phalanx.hosts.story import ENDED, Story, Told

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx import _native
    from phalanx.engines import Engine
    from phalanx.hosts.fingerprint import Header
    from phalanx.hosts.links import Gone, Late
    from phalanx.topology import Layout, Place

__all__ = ["Failing", "Seen", "Words"]

_MOST_WHY = 600
"""Characters of a reason that go to the black box."""
_FIRST_LOOK, _LONGEST_LOOK = 0.25, 8.0
"""Seconds between two looks at what others have told, in a wait that goes on."""
_OTHERS_FIRST = 0.5
"""Seconds that a rank whose time is up has for hearing what others know of the one that is late."""


@dataclass(frozen=True)
class Seen:
    """A native status, with ranks of the whole group."""

    code: str
    peer: int
    reporter: int
    error: int
    mine: Fingerprint
    theirs: Fingerprint


class Words(Protocol):
    """How the backend speaks of what happens."""

    def explained(self, status: Seen, timeout: float) -> tuple[str, str]:
        """What kind of failure it is, as a native code has it, and why, a sentence."""

    def reason(self, told: Told) -> str:
        """What breaks the group of this host, for its other ranks to understand by `explained`."""

    def operation(self, fingerprint: Fingerprint, site: str) -> str:
        """An operation and where it was called: "all_reduce #41 float32[8] SUM at train.py:40"."""

    def ending(self, site: str) -> str:
        """Text such as " at train.py:77", or nothing."""


class Failing:
    """Breaks a group that spans hosts: in memory, between hosts, and in the store.

    Args:
        native: The group of this host.
        layout: Who is on which host.
        places: Where each rank of the group is.
        story: What ranks tell each other.
        engine: What carries bytes between hosts.
        words: How the backend says it.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        places: list[Place],
        story: Story,
        engine: Engine,
        words: Words,
    ) -> None:
        self._native = native
        self._layout = layout
        self._places = places
        self._story = story
        self._words = words
        self._engine = engine
        self._lock = threading.Lock()
        self._left: dict[int, str] = {}
        self.closing = False
        """Whether this rank is leaving: its own closed connections are no news."""
        self.told: Told | None = None

    def seen(self, status: _native.Status, timeout: float) -> Told:
        """The native group of this host is broken."""
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
            # It may be the echo of what has happened on another host.
            heard = self._story.hear()
            if heard is not None:
                return self._break(heard)
        code, words = self._words.explained(named, timeout)
        return self.tell(Told(code, words, named.reporter, named.peer, named.error))

    def tell(self, told: Told) -> Told:
        """Break the group for this reason, unless another one came before; which it was."""
        return self._break(self.told or self._story.tell(told))

    def gone(self, gone: Gone, doing: str) -> Told:
        """The connection to a rank is closed: by its end, by its leaving, or as a consequence.

        Args:
            gone: Whose, and what the engine says.
            doing: The operation that needs it.
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
        """The same where no operation needs it now; whether it has left in good order.

        If not, the group is broken.
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
        """The time of an operation is up, in which this rank waited for one of another host."""
        # Whom that one waits for on its own host is known there, and its time is up there too.
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
        """For one wait, to be called again and again: asks now and then what others have told.

        Where there is no connection yet, none that is closed brings the news.
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
        """A rank of another host is in another operation."""
        rank = self._layout.rank
        mine = self._words.operation(own.fingerprint, own.site)
        other = self._words.operation(theirs.fingerprint, theirs.site)
        words = f"ranks disagree: rank {rank} is in {mine}, rank {peer} in {other}"
        return self.tell(Told("mismatch", words, rank, peer))

    def operation(self, header: Header) -> str:
        """What a rank is in, and where it called it."""
        return self._words.operation(header.fingerprint, header.site)

    def name(self, rank: int) -> str:
        """A rank with its process, for people."""
        if rank < 0:
            return "a rank of another host"
        place = self._places[rank]
        return f"rank {rank} ({place.process})"

    def _break(self, told: Told) -> Told:
        with self._lock:
            first, self.told = self.told is None, self.told or told
        if first:
            if not self._native.closed and self._native.broken() is None:
                self._native.abort(self._words.reason(told)[:_MOST_WHY])
            self._engine.abort()
        return self.told
