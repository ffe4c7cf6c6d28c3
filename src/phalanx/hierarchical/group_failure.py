"""The reason why a group broke, shared once with all ranks through the group's store.

A rank that detects a failure reports it before it closes its connections. Peers that find their
connections closed can then look up the reason. The first report wins, so all ranks raise the same
error. The store may be lost with its host, so every request to it has a short limit.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import DistError

from phalanx.transports.shutdown_hooks import delay_shutdown

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

__all__ = ["ENDED", "Story", "Told"]

_BROKEN = "phalanx/broken"
_LIMIT = 1.0
"""Seconds that the store has to answer a request."""
_SILENCE = 5.0
"""Seconds without requests after one that the store did not answer: its link may be severed."""
_GRACE = 0.25
"""Seconds within which the reason for a closed connection is in the store, if there is one."""
_PAUSE = 0.005
ENDED = "*"
"""Value in place of the call site from which a rank left: its process has ended."""


class Told(NamedTuple):
    """The failure that ends an operation, as described by the rank that found it."""

    code: str
    """The code of the failure, as in a native status."""
    words: str
    reporter: int
    peer: int = -1
    error: int = 0


class Story:
    """The state of a group that its ranks share: its failure, and the ranks that have left.

    Args:
        store: The group's store. Keys begin with "phalanx/".
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._told: Told | None = None
        self._ask_from = 0.0

    def tell(self, told: Told) -> Told:
        """Report why the group is broken, and return the failure that was reported first."""
        if self._told is None:
            text = json.dumps(told)
            answer = self._ask(lambda: self._store.compare_set(_BROKEN, "", text))
            self._told = _parsed(answer) or told
        return self._told

    def hear(self) -> Told | None:
        """Return why the group is broken, or None; wait up to 0.25 s for a report."""
        end = time.monotonic() + _GRACE
        while self._told is None:
            if self._ask(lambda: self._store.check([_BROKEN])):
                self._told = _parsed(self._ask(lambda: self._store.get(_BROKEN)))
            elif time.monotonic() >= end:
                break
            time.sleep(_PAUSE)
        return self._told

    def peek(self) -> Told | None:
        """Return why the group is broken, or None; check the store only once."""
        if self._told is None and self._ask(lambda: self._store.check([_BROKEN])):
            self._told = _parsed(self._ask(lambda: self._store.get(_BROKEN)))
        return self._told

    def leave(self, rank: int, site: str) -> None:
        """Record that a rank leaves the group in order, with the call site."""
        self._ask(lambda: self._store.set(_left(rank), site or "-"))

    def end(self, rank: int) -> None:
        """Record that a rank's process ends in order, without having left the group."""
        self._ask(lambda: self._store.set(_left(rank), ENDED))

    def left(self, rank: int) -> str | None:
        """Return the call site at which a rank left the group.

        Returns None if the rank has not left, an empty text if the call site is unknown, and
        `ENDED` if its process has ended.
        """
        if not self._ask(lambda: self._store.check([_left(rank)])):
            return None
        answer = self._ask(lambda: self._store.get(_left(rank)))
        site = answer.decode() if answer else ""
        return "" if site == "-" else site

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the store's answer; None if it does not answer in time."""
        if time.monotonic() < self._ask_from:
            return None
        answer: list[Any] = []

        def ask() -> None:
            with delay_shutdown():
                try:
                    answer.append(question())
                except (DistError, RuntimeError):  # the store is gone
                    answer.append(None)

        thread = threading.Thread(target=ask, name="phalanx-story", daemon=True)
        thread.start()
        thread.join(_LIMIT)
        if not answer:
            self._ask_from = time.monotonic() + _SILENCE
            return None
        return answer[0]


def _left(rank: int) -> str:
    return f"phalanx/left/{rank}"


def _parsed(answer: bytes | None) -> Told | None:
    return Told(*json.loads(answer)) if answer else None
