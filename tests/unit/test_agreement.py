"""The agreement of ranks after a failure, in random schedules: deaths, late ranks, lack of memory.

The ranks are threads, of which one runs at a time, from one access to the board to the next.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from phalanx.errors import RankExcluded
from phalanx.topology import Agreement, SegmentOfRound, Survivors

MAX_STEPS = 5_000
Location = tuple[int, int, int]


class Killed(BaseException):
    """Ends the thread of a rank that dies."""


class Hangs(BaseException):
    """Ends the thread of a rank that waits in vain."""


@dataclass
class Segment:
    creator: int
    entered: set[int] = field(default_factory=set)
    is_open: bool = True


@dataclass
class NewGroup:
    board: Board
    rank: int
    descriptor: int

    @property
    def identity(self) -> int:
        return self.descriptor

    def close(self) -> None:
        self.board.step(self.rank)
        self.board.close_segments(self.rank)


class Board:
    """The memory of the old group, and the schedule of its ranks."""

    def __init__(
        self, seed: int, size: int, *, deaths: int = 0, timeouts: int = 0, failures: int = 0
    ) -> None:
        self.random = random.Random(seed)
        self.size, self.deaths, self.timeouts, self.failures = size, deaths, timeouts, failures
        self.decisions: dict[tuple[int, int], str] = {}
        self.locations: dict[int, Location] = {}
        self.segments: list[Segment] = []
        self.dead: set[int] = set()
        self.gone: set[int] = set()
        self.lacking: set[int] = set()  # ranks that had no memory
        self.impatient: set[int] = set()  # ranks that did not wait for the end of another
        self.outcomes: dict[int, Survivors[Any] | BaseException] = {}
        self.turns = [threading.Semaphore(0) for _ in range(size)]
        self.arrived = threading.Semaphore(0)
        self.steps = 0

    def run(self) -> dict[int, Survivors[Any] | BaseException]:
        """Run all ranks to their ends, and return these."""
        ranks = range(self.size)
        threads = {rank: threading.Thread(target=self.live, args=(rank,)) for rank in ranks}
        for thread in threads.values():
            thread.start()
            self.arrived.acquire()
        while running := [rank for rank in threads if rank not in self.outcomes]:
            self.steps += 1
            self.turns[self.random.choice(running)].release()
            self.arrived.acquire()
        for thread in threads.values():
            thread.join()
        return self.outcomes

    def live(self, rank: int) -> None:
        outcome: Survivors[Any] | BaseException
        try:
            outcome = TestedAgreement(self, rank).reach(self.size)
        except BaseException as error:
            outcome = error
        if isinstance(outcome, Survivors):
            self.close_segments(rank)
        self.outcomes[rank] = outcome
        self.arrived.release()

    def step(self, rank: int) -> None:
        """Let other ranks run before an access; the rank may die here."""
        self.arrived.release()
        self.turns[rank].acquire()
        if self.steps > MAX_STEPS:
            raise Hangs
        if self.takes("deaths", 40):
            self.dead.add(rank)
            self.close_segments(rank)
            raise Killed

    def takes(self, name: str, chance: int) -> bool:
        """Return at random, once in `chance` times, whether one of the faults happens."""
        if getattr(self, name) == 0 or self.random.randrange(chance) != 0:
            return False
        setattr(self, name, getattr(self, name) - 1)
        return True

    def close_segments(self, creator: int) -> None:
        for segment in self.segments:
            if segment.creator == creator:
                segment.is_open = False

    def decide(self, number: int, rank: int, wanted: str) -> str:
        assert number < 2 * self.size + 2
        return self.decisions.setdefault((number, rank), wanted)

    def has_gone(self, rank: int) -> bool:
        """Return whether a rank has gone, which is visible some time after its files are closed."""
        has_ended = rank in self.dead or isinstance(self.outcomes.get(rank), RankExcluded)
        if has_ended and self.random.randrange(4) == 0:
            self.gone.add(rank)
        return rank in self.gone

    def enter(self, rank: int, location: Location | None) -> NewGroup:
        if self.takes("failures", 4):
            self.lacking.add(rank)
            raise OSError(errno.ENOMEM, "no memory")
        if location is None:
            self.segments.append(Segment(rank))
            location = (rank, len(self.segments) - 1, 0)
        segment = self.segments[location[1]]
        if not segment.is_open:
            raise OSError(errno.ENOENT, "no such file")
        segment.entered.add(rank)
        return NewGroup(self, rank, location[1])


class OldGroup:
    """A rank's view of the board."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank

    def decide(self, number: int, rank: int, wanted: str) -> str:
        self.board.step(self.rank)
        return self.board.decide(number, rank, wanted)

    def decision(self, number: int, rank: int) -> str | None:
        self.board.step(self.rank)
        return self.board.decisions.get((number, rank))

    def has_gone(self, rank: int) -> bool:
        self.board.step(self.rank)
        return self.board.has_gone(rank)

    def publish_successor(self, number: int, descriptor: int, nonce: int) -> None:
        self.board.step(self.rank)
        assert number not in self.board.locations
        self.board.locations[number] = (self.rank, descriptor, nonce)

    def successor(self, number: int) -> Location | None:
        self.board.step(self.rank)
        return self.board.locations.get(number)


class TestedSegments(SegmentOfRound):
    """Segments on the board."""

    __test__ = False

    def __init__(self, board: Board, old: Any) -> None:
        super().__init__(old, (), (), "")
        self.board, self.rank = board, old.rank

    def _enter(  # type: ignore[override]
        self, location: Location | None, members: Sequence[int], rank: int
    ) -> NewGroup:
        assert members[rank] == self.rank
        self.board.step(self.rank)
        return self.board.enter(self.rank, location)


class TestedAgreement(Agreement[Any]):
    """An agreement whose timeouts come at random."""

    __test__ = False

    def __init__(self, board: Board, rank: int) -> None:
        old = OldGroup(board, rank)
        segments: Any = TestedSegments(board, old)
        super().__init__(old, rank, old.has_gone, 1.0, segments.form)
        self.schedule = board

    def looks(self, extra: float = 0.0) -> Iterator[bool]:
        while not self.schedule.takes("timeouts", 10):
            yield False
        self.schedule.impatient.add(self.rank)
        yield True


def check(board: Board) -> None:
    """Run the ranks, and check that those that go on agree."""
    outcomes = board.run()
    reached = {rank: each for rank, each in outcomes.items() if isinstance(each, Survivors)}
    for rank, outcome in outcomes.items():
        if isinstance(outcome, OSError):
            assert rank in board.lacking | board.impatient
        elif isinstance(outcome, RankExcluded):
            assert board.impatient
        elif not isinstance(outcome, (Survivors, Killed)):
            raise outcome
    assert len({(each.ranks, each.group.identity) for each in reached.values()}) <= 1
    for rank, each in reached.items():
        assert rank in each.ranks
        assert set(each.ranks) <= board.segments[each.group.identity].entered
        assert all(isinstance(outcomes[member], (Survivors, Killed)) for member in each.ranks)


@pytest.mark.parametrize("deaths", [0, 1, 3])
@pytest.mark.parametrize("timeouts", [0, 1, 3])
@pytest.mark.parametrize("failures", [0, 1])
def test_ranks_agree_in_any_schedule(deaths: int, timeouts: int, failures: int) -> None:
    first = random.randrange(2**31)
    for seed in range(first, first + 40):
        board = Board(seed, 2 + seed % 4, deaths=deaths, timeouts=timeouts, failures=failures)
        try:
            check(board)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {board.size} ranks") from error
