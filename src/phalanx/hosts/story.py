"""Why a group broke, for those who can't see it: told once, through the group's store.

Who finds a failure tells it before the connections are closed, so that whoever finds them closed
can know why. The first to tell it wins: all ranks say the same. The store may be gone with the host
that has it, so nobody waits for it long.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import DistError

from phalanx.engines.ending import inside_a_library

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

__all__ = ["ENDED", "Story", "Told"]

_BROKEN = "phalanx/broken"
_LIMIT = 1.0
"""Seconds that the store has for an answer."""
_SILENCE = 5.0
"""Seconds in which nothing more is asked of a store that gave none: it may be behind a cut link."""
_GRACE = 0.25
"""Seconds in which who closes a connection has told why, if anybody has."""
_PAUSE = 0.005
ENDED = "*"
"""In the place of where a rank left: its process has ended."""


class Told(NamedTuple):
    """What ends an operation, in the words of the rank that found it."""

    code: str
    """As a native status has it."""
    words: str
    reporter: int
    peer: int = -1
    error: int = 0


class Story:
    """What has become of a group, as far as the ranks have told each other.

    Args:
        store: The group's. Keys begin with "phalanx/".
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._told: Told | None = None
        self._ask_from = 0.0

    def tell(self, told: Told) -> Told:
        """Say why the group is broken; what was told first."""
        if self._told is None:
            text = json.dumps(told)
            answer = self._ask(lambda: self._store.compare_set(_BROKEN, "", text))
            self._told = _parsed(answer) or told
        return self._told

    def hear(self) -> Told | None:
        """Why the group is broken, if somebody has told it or does so now."""
        end = time.monotonic() + _GRACE
        while self._told is None:
            if self._ask(lambda: self._store.check([_BROKEN])):
                self._told = _parsed(self._ask(lambda: self._store.get(_BROKEN)))
            elif time.monotonic() >= end:
                break
            time.sleep(_PAUSE)
        return self._told

    def peek(self) -> Told | None:
        """Why the group is broken, if somebody has told it; asked once."""
        if self._told is None and self._ask(lambda: self._store.check([_BROKEN])):
            self._told = _parsed(self._ask(lambda: self._store.get(_BROKEN)))
        return self._told

    def leave(self, rank: int, site: str) -> None:
        """Say that a rank leaves the group in good order, and where it called for that."""
        self._ask(lambda: self._store.set(_left(rank), site or "-"))

    def end(self, rank: int) -> None:
        """Say that a rank's process ends in good order, without having left the group."""
        self._ask(lambda: self._store.set(_left(rank), ENDED))

    def left(self, rank: int) -> str | None:
        """Where a rank left the group; None if it hasn't, empty if that isn't known.

        `ENDED` if its process has ended.
        """
        if not self._ask(lambda: self._store.check([_left(rank)])):
            return None
        answer = self._ask(lambda: self._store.get(_left(rank)))
        site = answer.decode() if answer else ""
        return "" if site == "-" else site

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The store's answer; None if it has none in time."""
        if time.monotonic() < self._ask_from:
            return None
        answer: list[Any] = []

        def ask() -> None:
            with inside_a_library():
                try:
                    answer.append(question())
                except (DistError, RuntimeError):  # it is gone
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
