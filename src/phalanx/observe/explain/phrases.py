"""Building blocks of sentences about a job: ranks, locations, times and waiting ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.exit_reasons import get_clock_offset
from phalanx.observe.explain.formatting import (
    format_call_site,
    format_duration,
    format_last_note,
    format_operation,
    format_ranks,
    format_time,
    get_last_step,
    join_texts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.observe.diagnosis.diagnosis import Diagnosis, Side
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph
    from phalanx.observe.model import Operation

__all__ = ["Phrases"]

_MAX_SIDES = 4
"""Maximum number of sides of waiting ranks that a sentence lists; the table lists all."""


class Phrases:
    """Phrases about the graph and the diagnosis of a job, shared by the sentences of all kinds."""

    def __init__(self, graph: WaitForGraph, diagnosis: Diagnosis) -> None:
        self.graph = graph
        self.diagnosis = diagnosis
        self.is_live = graph.is_live

    def choose_tense(self, present: str, past: str) -> str:
        """Choose the tense of a verb: `present` if the graph's moment is now, else `past`."""
        return present if self.is_live else past

    @property
    def subject(self) -> str:
        """The ranks at fault, capitalized: "Rank 5 (pid 812)", "Ranks 0-3, 7"."""
        return self.describe_ranks(self.diagnosis.ranks).capitalize()

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """Format ranks, with the pid if there is only one: "rank 5 (pid 812)"."""
        if len(ranks) != 1:
            return format_ranks(ranks) if ranks else "some rank"
        pid = self.graph.ranks[ranks[0]].pid
        return f"{format_ranks(ranks)} (pid {pid})" if pid else format_ranks(ranks)

    def conjugate_be(self, ranks: Sequence[int] | None = None) -> str:
        """Return the form of "to be" that fits the ranks; default: the ranks at fault."""
        return self.choose_tense(
            self.choose_number("is", "are", ranks), self.choose_number("was", "were", ranks)
        )

    def choose_number(self, one: str, many: str, ranks: Sequence[int] | None = None) -> str:
        """Choose singular or plural for the number of ranks; default: the ranks at fault."""
        return one if len(self.diagnosis.ranks if ranks is None else ranks) == 1 else many

    def describe_time(self, time: int) -> str:
        """Format a time: " at 14:03:22", plus " (34 s ago)" while the job runs; "" if unknown."""
        clock = get_clock_offset(self.graph.job)
        if not time or not clock:
            return ""
        ago, alive = self.graph.job.now - time, self.graph.is_running
        return f" at {format_time(time + clock)}" + (
            f" ({format_duration(ago)} ago)" if alive else ""
        )

    def describe_duration(self, time: int) -> str:
        """Format the time up to the graph's moment: " for 34 s (since 14:03:22)", or ""."""
        clock = get_clock_offset(self.graph.job)
        if not time or time > self.graph.moment:
            return ""
        begin = f" (since {format_time(time + clock)})" if clock else ""
        return f" for {format_duration(self.graph.moment - time)}{begin}"

    def describe_operation(self, rank: int, operation: Operation) -> str:
        """Describe an operation and its call site: "barrier #3 at train.py:40"."""
        site = format_call_site(operation)
        return format_operation(self.graph, rank, operation) + (f" at {site}" if site else "")

    def describe_call(self, side: Side) -> str:
        """Describe the operation that the ranks of a side called."""
        if side.operation is None:
            return "nothing"
        return self.describe_operation(side.ranks[0], side.operation)

    def describe_position(self, side: Side) -> str:
        """Describe the location of a side: "in barrier #3 at a.py:7", "in its own code"."""
        if side.operation is None:
            return f"in {'its' if len(side.ranks) == 1 else 'their'} own code"
        return f"{_get_preposition(side.operation)}{self.describe_call(side)}"

    def describe_location(self, rank: int) -> str:
        """Describe the location of a rank: ', in barrier #3 at a.py:7, step 17, "evaluating"'."""
        operation, before = self.graph.current_operation(rank), self.graph.previous_operation(rank)
        text = ", in its own code"
        if operation is not None:
            text = f", {_get_preposition(operation)}{self.describe_operation(rank, operation)}"
        elif before is not None:
            text = f", in its own code after {self.describe_operation(rank, before)}"
        elif not self.graph.ranks[rank].opened:
            text = ", before it joined any group"
        step = self.get_step(rank)
        text += f", step {step}" if step is not None else ""
        note = format_last_note(self.graph.ranks[rank])
        return text + (f", {note}" if note else "")

    def get_step(self, rank: int) -> int | None:
        """Return the last step that a rank reported; None if there is none."""
        return get_last_step(self.graph.ranks[rank])

    def describe_waiting_ranks(self) -> list[str]:
        """Return a sentence about the ranks that wait for those at fault; empty if none do."""
        sides = self.diagnosis.waiting
        if not sides:
            return []
        at_fault = format_ranks(self.diagnosis.ranks) if self.diagnosis.ranks else "it"
        begun = [side.operation.begin for side in sides if side.operation is not None]
        since = self.describe_duration(min(begun, default=0))
        if len(sides) == 1:
            (side,) = sides
            verb = self.choose_tense(
                "has waited" if len(side.ranks) == 1 else "have waited", "waited"
            )
            waiting = format_ranks(side.ranks).capitalize()
            return [f"{waiting} {verb} for {at_fault} {self.describe_position(side)}{since}."]
        shown = [
            f"{format_ranks(side.ranks)} {self.describe_position(side)}"
            for side in sides[:_MAX_SIDES]
        ]
        if more := sum(len(side.ranks) for side in sides[_MAX_SIDES:]):
            shown.append(f"{more} more in other operations")
        verb = self.choose_tense("have waited", "waited")
        return [f"Other ranks {verb} for {at_fault}{since}: {join_texts(shown)}."]


def _get_preposition(operation: Operation) -> str:
    """Return the preposition for an operation that a rank is in; a join is worded as a verb."""
    return "" if operation.kind == "join" else "in "
