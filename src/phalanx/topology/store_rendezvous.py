"""Waiting for the other ranks while a group is formed."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import DistError

from phalanx.errors import CollectiveTimeout, PhalanxError
from phalanx.system.polling import attempts
from phalanx.topology.rank_record import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

    from phalanx import _native

__all__ = ["Meeting"]

_MOST_TOLD = 8
"""The maximum number of missing ranks that an error describes."""


class Meeting(NamedTuple):
    """A group that is being formed, as one of its ranks takes part.

    Attributes:
        store: The store of the group, or of a round of it.
        rank: This rank in the group.
        size: World size of the group.
        start: The time at which this rank arrived, in monotonic seconds.
        seconds: The time that this rank waits for the others, in seconds.
        joining: The entry in the flight recorder for the formation of the group.
        where: Describes a missing rank; see `join`.
        members: Ranks in the job by rank in the group; empty for the default group.
    """

    store: Store
    rank: int
    size: int
    start: float
    seconds: float
    joining: _native.GroupFormation
    where: Callable[[int, str], str] | None
    members: Sequence[int] = ()

    def everyone(self, name: str) -> list[str]:
        """Return the values that all ranks publish under a name, by rank; blocks until they have.

        Raises:
            CollectiveTimeout: A rank did not publish a value before the deadline.
            PhalanxError: Another rank cannot join.
        """
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
        """Return the value that a rank publishes under a name; blocks and raises as `everyone`."""
        self.joining.waiting_for(rank)
        for _ in self.tries(lambda: [rank]):
            self.raise_failure()
            if self.store.check([key(name, rank)]):
                break
        said: bytes = self.store.get(key(name, rank))
        return said.decode()

    def tries(self, missing: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Yield once per attempt until the deadline, then raise `CollectiveTimeout`.

        Args:
            missing: Returns the ranks that have not arrived, for the message.
        """
        yield from attempts(self.start + self.seconds)
        absent = missing()
        ranks = ", ".join(map(str, absent))
        raise CollectiveTimeout(
            f"[rank {self.rank}/{self.size} on {socket.gethostname()}] joining the group: rank "
            f"{ranks} did not come before the deadline, in the {self.seconds:g} s since this rank "
            f"came{self._told(absent)}{self._advice(absent)}"
        )

    def fail(self, words: str) -> PhalanxError:
        """Tell the other ranks that this rank cannot join, and return the error to raise."""
        # Recorded before the others are told: the first rank to fail is taken for the cause.
        self.joining.end("system")
        words = f"rank {self.rank} could not join: {words}"
        self.store.set("phalanx/failed", words)
        return PhalanxError(f"[rank {self.rank}/{self.size}] {words.partition(' ')[2]}")

    def raise_failure(self) -> None:
        """Raise `PhalanxError` if another rank cannot join."""
        if self.store.check(["phalanx/failed"]):
            reason = self.store.get("phalanx/failed").decode()
            raise PhalanxError(f"[rank {self.rank}/{self.size}] {reason}")

    def _first_missing(self, keys: list[str], first: int) -> int:
        """Return the index of the first missing key from `first` on, or `len(keys)` if all exist.

        Takes about log2(len(keys)) queries, of growing and then shrinking ranges of keys. With one
        query per key, the ranks would send world size squared queries to one process.
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

    def _advice(self, absent: Sequence[int]) -> str:
        if not self.members:
            return ": are all processes started, with the same world size and address?"
        entered = [rank == self.rank or self._holder(rank) != "" for rank in range(self.size)]
        callers = [each for each, is_in in zip(self.members, entered, strict=True) if is_in]
        others = [self.members[rank] for rank in absent if not entered[rank]]
        if not others:
            return ""
        return (
            f": new_group for the ranks {list(self.members)} of the job was called by {callers}, "
            f"but not by {others}. All ranks of the job must call it, in the same order, even "
            "those that are not in the new group"
        )

    def _told(self, ranks: Sequence[int]) -> str:
        """Return descriptions of missing ranks."""
        if self.where is None:
            return ""
        known = [(rank, self.where(rank, self._holder(rank))) for rank in ranks[:_MOST_TOLD]]
        return "".join(f"; rank {rank} {words}" for rank, words in known if words)

    def _holder(self, rank: int) -> str:
        with contextlib.suppress(DistError):  # the host of the store may have exited
            if self.store.check([key("rank", rank)]):
                return Place.parse(self.store.get(key("rank", rank)).decode()).process
        return ""


def key(name: str, rank: int) -> str:
    """Return the key in the store under which a rank publishes a value."""
    return f"phalanx/{name}/{rank}"
