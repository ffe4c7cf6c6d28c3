"""The parts that sentences about a job are made of: ranks, places, times, and who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.observe.culprit.endings import clock_of
from phalanx.observe.explain.words import (
    called_at,
    clock_time,
    joined,
    last_note,
    last_step,
    named,
    operation_of,
    span,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.observe.culprit.verdict import Side, Verdict
    from phalanx.observe.culprit.waits import Scene
    from phalanx.observe.model import Operation

__all__ = ["Words"]

_MOST_SIDES = 4
"""Of so many places at which ranks wait, a sentence tells; the table tells of all."""


class Words:
    """What the wordings of all kinds are made of."""

    def __init__(self, scene: Scene, verdict: Verdict) -> None:
        self.scene = scene
        self.verdict = verdict
        self.live = scene.live

    def now(self, present: str, past: str) -> str:
        """The form of a verb: `present` while all this goes on."""
        return present if self.live else past

    @property
    def who(self) -> str:
        """The culprits, as a sentence begins: "Rank 5 (pid 812)", "Ranks 0-3, 7"."""
        return self.rank(self.verdict.ranks).capitalize()

    def rank(self, ranks: Sequence[int]) -> str:
        """Ranks, with the process where it is one: "rank 5 (pid 812)"."""
        if len(ranks) != 1:
            return named(ranks) if ranks else "some rank"
        pid = self.scene.ranks[ranks[0]].pid
        return f"{named(ranks)} (pid {pid})" if pid else named(ranks)

    def be(self, ranks: Sequence[int] | None = None) -> str:
        """What ranks, else the culprits, are or were."""
        one = len(self.verdict.ranks if ranks is None else ranks) == 1
        return self.now("is" if one else "are", "was" if one else "were")

    def at(self, time: int) -> str:
        """A moment: " at 14:03:22", with " (34 s ago)" while the job is there; or nothing."""
        clock = clock_of(self.scene.job)
        if not time or not clock:
            return ""
        ago, alive = self.scene.job.now - time, self.scene.runs
        return f" at {clock_time(time + clock)}" + (f" ({span(ago)} ago)" if alive else "")

    def since(self, time: int) -> str:
        """A span up to the moment: " for 34 s (since 14:03:22)", or nothing."""
        clock = clock_of(self.scene.job)
        if not time or time > self.scene.moment:
            return ""
        begin = f" (since {clock_time(time + clock)})" if clock else ""
        return f" for {span(self.scene.moment - time)}{begin}"

    def operation(self, rank: int, operation: Operation) -> str:
        """An operation with its call site: "all_reduce #41 float32[1024] SUM at train.py:40"."""
        site = called_at(operation)
        return operation_of(self.scene, rank, operation) + (f" at {site}" if site else "")

    def called(self, side: Side) -> str:
        """What the ranks of a side called."""
        if side.operation is None:
            return "nothing"
        return self.operation(side.ranks[0], side.operation)

    def inside(self, side: Side) -> str:
        """Where the ranks of a side were: "in barrier #3 at a.py:7", "in code of its own"."""
        if side.operation is None:
            return f"in code of {'its' if len(side.ranks) == 1 else 'their'} own"
        return f"{_preposition(side.operation)}{self.called(side)}"

    def place(self, rank: int) -> str:
        """Where a rank was: ', in barrier #3 at a.py:7, step 17, "evaluating"'."""
        operation, before = self.scene.under_way(rank), self.scene.before(rank)
        words = ", in code of its own"
        if operation is not None:
            words = f", {_preposition(operation)}{self.operation(rank, operation)}"
        elif before is not None:
            words = f", in code of its own after {self.operation(rank, before)}"
        elif not self.scene.ranks[rank].opened:
            words = ", before it joined any group"
        step = self.step(rank)
        words += f", step {step}" if step is not None else ""
        note = last_note(self.scene.ranks[rank])
        return words + (f", {note}" if note else "")

    def step(self, rank: int) -> int | None:
        """The last step that a rank reported."""
        return last_step(self.scene.ranks[rank])

    def waiting(self) -> list[str]:
        """A sentence on those who wait because of the culprits; none if nobody does."""
        sides = self.verdict.waiting
        if not sides:
            return []
        them = named(self.verdict.ranks) if self.verdict.ranks else "it"
        begun = [side.operation.begin for side in sides if side.operation is not None]
        since = self.since(min(begun, default=0))
        if len(sides) == 1:
            (side,) = sides
            wait = self.now("waits" if len(side.ranks) == 1 else "wait", "waited")
            who = named(side.ranks).capitalize()
            return [f"{who} {wait} for {them} {self.inside(side)}{since}."]
        shown = [f"{named(side.ranks)} {self.inside(side)}" for side in sides[:_MOST_SIDES]]
        if more := sum(len(side.ranks) for side in sides[_MOST_SIDES:]):
            shown.append(f"{more} more elsewhere")
        return [f"For {them} {self.now('wait', 'waited')}{since}: {joined(shown)}."]


def _preposition(operation: Operation) -> str:
    """What stands before an operation that a rank is in: its name may be a verb."""
    return "" if operation.kind == "join" else "in "
