"""The agreement of a group's ranks, after a failure, on those that go on, and their new group.

Ranks die at any time, also during the agreement, and do not learn of it at the same time. Still no
two ranks may go on with different members. Therefore all decisions are made once, by a
compare-and-swap: in each round, a rank either joins by itself or is excluded by another. A round is
complete when there is a decision on each of its candidates, and then all ranks read the same.

The members of a round form a group. Those that are in it join the next round. If all do, the
agreement is reached. Otherwise, the members of the next round form another group. The decisions are
on a board that outlives each of the ranks: the segment of the old group on one host, the store of
the old group over several.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from phalanx.errors import RankExcluded
from phalanx.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

_LONGEST_PAUSE = 0.002
"""The longest time between two looks at the board, in seconds."""
_JOINED, _STRANDED, _EXCLUDED = "joined", "stranded", "excluded"


class Board(Protocol):
    """The decisions of an agreement."""

    def decide(self, number: int, rank: int, wanted: str, /) -> str:
        """Decide on a rank in a round, unless that is done; return the decision."""

    def decision(self, number: int, rank: int, /) -> str | None:
        """Return the decision on a rank in a round; None if there is none yet."""


class StoreBoard:
    """A board in a store.

    Args:
        store: A store that only this agreement uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def decide(self, number: int, rank: int, wanted: str, /) -> str:
        """Decide on a rank in a round, unless that is done; return the decision."""
        decision: bytes = self._store.compare_set(f"{number}/{rank}", "", wanted)
        return decision.decode()

    def decision(self, number: int, rank: int, /) -> str | None:
        """Return the decision on a rank in a round; None if there is none yet."""
        key = f"{number}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None


class Closable(Protocol):
    """A group that a rank can leave."""

    def close(self) -> None:
        """Leave the group."""


_Group = TypeVar("_Group", bound=Closable)
_Found = TypeVar("_Found")


class Survivors(NamedTuple, Generic[_Group]):
    """The outcome of an agreement.

    Attributes:
        ranks: The ranks that go on, as numbers in the old group, in ascending order.
        group: The new group, in which the rank is the index in `ranks`.
        late: The ranks that this rank excluded although they seemed alive, since they were late.
    """

    ranks: tuple[int, ...]
    group: _Group
    late: tuple[int, ...]


class Agreement(Generic[_Group]):
    """A rank's part in an agreement.

    Args:
        board: The board of the old group.
        rank: This rank in the old group.
        has_gone: Returns whether a rank has left, or is known to have died.
        timeout: The time for which ranks that are alive are waited for, in seconds, in each round.
        form: Forms the group of a round, with its number and its members. It returns None if it
            gives up because of another rank; that rank must be excluded from the next round.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        has_gone: Callable[[int], bool],
        timeout: float,
        form: Callable[[Agreement[_Group], int, Sequence[int]], _Group | None],
    ) -> None:
        self.board = board
        self.rank = rank
        self.has_gone = has_gone
        self._timeout = timeout
        self._form = form
        self._late: set[int] = set()

    def reach(self, size: int) -> Survivors[_Group]:
        """Agree with the other ranks of the old group; blocks until all have joined or are gone.

        If this ends with an exception, this rank must leave the old group: it has decided already,
        and cannot take part once more.

        Args:
            size: World size of the old group.

        Raises:
            RankExcluded: The others go on without this rank.
            OSError: This rank cannot enter the new group; the others go on without it.
        """
        members: Sequence[int] = range(size)
        group: _Group | None = None
        try:
            for number in itertools.count():
                self._join(number, is_in=group is not None or number == 0)
                decisions = {rank: self._wait_for_decision(number, rank) for rank in members}
                if group is not None and set(decisions.values()) == {_JOINED}:
                    return Survivors(tuple(members), group, tuple(sorted(self._late)))
                _close(group)
                group = None
                members = [rank for rank, decision in decisions.items() if decision != _EXCLUDED]
                group = self._form_or_leave(number, members)
        except BaseException:
            _close(group)
            raise
        raise AssertionError("each round but the last has fewer members, or a dead one")

    def _join(self, number: int, *, is_in: bool) -> None:
        wanted = _JOINED if is_in else _STRANDED
        if self.board.decide(number, self.rank, wanted) == _EXCLUDED:
            raise RankExcluded(
                f"rank {self.rank} was excluded from the group by the other ranks, which go on "
                "without it: it was late. End this process"
            )

    def exclude(self, number: int, rank: int) -> bool:
        """Exclude a rank from a round; return False if it has joined."""
        is_alive = not self.has_gone(rank)
        is_excluded = self.board.decide(number, rank, _EXCLUDED) == _EXCLUDED
        if is_excluded and is_alive:
            self._late.add(rank)
        return is_excluded

    def is_excluded(self, number: int, rank: int) -> bool:
        """Return whether a rank is excluded from a round so far."""
        return self.board.decision(number, rank) == _EXCLUDED

    def wait_for_first(
        self, number: int, first: int, look: Callable[[], _Found | None], extra: float = 0.0
    ) -> _Found | None:
        """Wait for what the lowest member of a round publishes before it joins the next round.

        Args:
            number: The number of the round.
            first: The lowest member.
            look: Returns what is published; None if it is not yet.
            extra: Seconds beyond the timeout that the member may take.

        Returns:
            What is published; None if the member is excluded from the next round instead.
        """
        for is_last in self.looks(extra):
            if (found := look()) is not None:
                return found
            is_lost = self.has_gone(first) or is_last
            check = self.exclude if is_lost else self.is_excluded
            if check(number + 1, first):
                return None  # by this rank or another, or by itself if it could not
        return look()

    def looks(self, extra: float = 0.0) -> Iterator[bool]:
        """Yield before each look at the board, and whether it is the last before the timeout."""
        end = time.monotonic() + self._timeout + extra
        for _ in attempts(end, longest=_LONGEST_PAUSE):
            yield time.monotonic() >= end

    def _wait_for_decision(self, number: int, rank: int) -> str:
        """Return the decision on a rank in a round; exclude it if it has gone or is late."""
        for is_last in self.looks():
            if (found := self.board.decision(number, rank)) is not None:
                return found
            if is_last or self.has_gone(rank):
                break
        if self.exclude(number, rank):
            return _EXCLUDED
        found = self.board.decision(number, rank)
        assert found is not None, "a rank that is not excluded has decided"
        return found

    def _form_or_leave(self, number: int, members: Sequence[int]) -> _Group | None:
        """Form the group of a round; if that fails here, the others go on without this rank."""
        try:
            return self._form(self, number, members)
        except BaseException:
            self.board.decide(number + 1, self.rank, _EXCLUDED)
            raise


def _close(group: Closable | None) -> None:
    if group is not None:
        group.close()
