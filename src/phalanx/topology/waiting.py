"""How a rank waits for the others while a group is formed."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import DistError

from phalanx.errors import CollectiveTimeout, PhalanxError
from phalanx.topology.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

    from phalanx import _native

__all__ = ["Meeting"]

_MOST_TOLD = 8
"""Of so many ranks that don't come an error says what is known."""


@dataclass(frozen=True)
class Meeting:
    """The ranks of a group while it is formed, and how long one waits for the others.

    Attributes:
        store: The group's.
        rank: This rank in the group.
        size: World size of the group.
        start: When this rank came, in monotonic seconds.
        seconds: How long it waits.
        joining: What the black box says of it.
        where: What is known of a rank that doesn't come; see `join`.
    """

    store: Store
    rank: int
    size: int
    start: float
    seconds: float
    joining: _native.Joining
    where: Callable[[int, str], str] | None

    def everyone(self, name: str) -> list[str]:
        """What all ranks say under a name, by rank, once they have said it."""
        keys = [key(name, rank) for rank in range(self.size)]
        first = 0
        for _ in self.tries(lambda: self._missing(keys)):
            first = self._first_missing(keys, first)
            if first == self.size:
                break
            self.joining.waiting_for(first)
            self.raise_failure()
        if self.store.has_extended_api():  # type: ignore[attr-defined]
            return [value.decode() for value in self.store.multi_get(keys)]
        return [self.store.get(each).decode() for each in keys]

    def one(self, name: str, rank: int) -> str:
        """What a rank says under a name, once it has said it."""
        self.joining.waiting_for(rank)
        for _ in self.tries(lambda: [rank]):
            self.raise_failure()
            if self.store.check([key(name, rank)]):
                break
        said: bytes = self.store.get(key(name, rank))
        return said.decode()

    def tries(self, missing: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Look again and again, until the deadline: a blocking wait would not hear Ctrl-C."""
        pause = 0.0005
        while time.monotonic() < self.start + self.seconds:
            yield
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        absent = missing()
        ranks = ", ".join(map(str, absent))
        raise CollectiveTimeout(
            f"[rank {self.rank}/{self.size} on {socket.gethostname()}] joining the group: rank "
            f"{ranks} did not come before the deadline, in the {self.seconds:g} s since this rank "
            f"came{self._told(absent)}: are all processes started, with the same world size and "
            "address?"
        )

    def fail(self, words: str) -> PhalanxError:
        """Tell the others that this rank can't join; the error for it."""
        # Before the others hear of it: who failed first is the cause.
        self.joining.end("system")
        words = f"rank {self.rank} could not join: {words}"
        self.store.set("phalanx/failed", words)
        return PhalanxError(f"[rank {self.rank}/{self.size}] {words.partition(' ')[2]}")

    def raise_failure(self) -> None:
        """Raise what keeps another rank from joining."""
        if self.store.check(["phalanx/failed"]):
            reason = self.store.get("phalanx/failed").decode()
            raise PhalanxError(f"[rank {self.rank}/{self.size}] {reason}")

    def _first_missing(self, keys: list[str], first: int) -> int:
        """The first of these keys, from `first` on, that isn't there; their number if all are.

        In some log2(keys) questions, of ever more keys and then of ever fewer: one for each key
        would be the square of the world size in all, and all go to one process.
        """
        step = 1
        while first < len(keys) and self.store.check(keys[first : first + step]):
            first = min(first + step, len(keys))
            step *= 2
        while first < len(keys) and step > 1:
            step //= 2
            if self.store.check(keys[first : first + step]):
                first = min(first + step, len(keys))
        return first

    def _missing(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, each in enumerate(keys) if not self.store.check([each])]

    def _told(self, ranks: Sequence[int]) -> str:
        """What is known of ranks that have not come."""
        if self.where is None:
            return ""
        known = [(rank, self.where(rank, self._holder(rank))) for rank in ranks[:_MOST_TOLD]]
        return "".join(f"; rank {rank} {words}" for rank, words in known if words)

    def _holder(self, rank: int) -> str:
        with contextlib.suppress(DistError):  # who hosts the store may be gone
            if self.store.check([key("rank", rank)]):
                return Place.parse(self.store.get(key("rank", rank)).decode()).process
        return ""


def key(name: str, rank: int) -> str:
    """Where a rank says something in the store."""
    return f"phalanx/{name}/{rank}"
