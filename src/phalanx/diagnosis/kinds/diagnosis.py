"""The base class of all kinds of diagnoses, with the phrases that their sentences share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from phalanx.diagnosis.exit_reasons import ExitStatus, get_clock_offset
from phalanx.diagnosis.formatting import (
    format_call_site,
    format_duration,
    format_last_note,
    format_operation,
    format_ranks,
    format_time,
    join_texts,
)
from phalanx.system.escape import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.diagnosis.model import Group, Operation
    from phalanx.diagnosis.wait_for_graph import WaitForGraph

_ALIVE = ExitStatus("alive")
_MAX_SIDES = 4
"""Maximum number of sides of waiting ranks that a sentence lists; the table lists all."""

CHECK_BRANCHES = (
    "Check the conditions that lead to these lines: `if rank == ...`, a loop whose length depends "
    "on the data, an exception that only one rank catches. Every rank must call the same "
    "collectives of a group in the same order, with the same dtype, size, root and operator."
)
"""A suggested fix for ranks that call different operations."""

KINDS: dict[str, type[Diagnosis]] = {}
"""The class of each kind of diagnosis, by its name."""


@dataclass(frozen=True)
class Side:
    """Ranks at the same point of the program.

    Attributes:
        ranks: The numbers of the ranks in the job.
        operation: The operation that they were in; None if they were in their own code.
        group: The operation's group, as the first of the ranks recorded it.
    """

    ranks: tuple[int, ...]
    operation: Operation | None = None
    group: Group | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a hang or a failure: the ranks at fault, and the evidence against them.

    Each kind is a subclass. It describes the cause, suggests fixes, and has a method `detect`,
    which returns a diagnosis or None. Some kinds are found by functions that choose among several.
    `phalanx.diagnosis.kinds` lists both in the order in which they are tried.

    Attributes:
        graph: The state of the job that the diagnosis explains.
        ranks: The numbers of the ranks at fault. For `branch`, `tensor`, `order` and `deadlock`:
            the ranks in the minority, or all ranks concerned if there is no minority. For `unsent`:
            the waiting ranks.
        since: The time at which the state began, in nanoseconds of the monotonic clock; 0 if
            unknown.
        sides: The ranks by the point of the program that they had reached: those at fault first,
            then others concerned. In a cycle, each side waits for the next.
        waiting: The ranks that waited for those at fault, directly or indirectly.
        exit_status: The end of the (first) rank at fault; "alive" if not applicable.
        instead: A message that was sent in place of the awaited one.
        reason: Text from the job: the exception, the reason for an abort, or why the cause is
            unknown.
        kind: The name of the kind.
        fixes: The suggested fixes if they are always the same: concrete steps, the most likely
            first.
    """

    graph: WaitForGraph = field(repr=False, compare=False)
    ranks: tuple[int, ...] = ()
    since: int = 0
    sides: tuple[Side, ...] = ()
    waiting: tuple[Side, ...] = ()
    exit_status: ExitStatus = _ALIVE
    instead: Operation | None = None
    reason: str = ""

    kind: ClassVar[str]
    fixes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

    @classmethod
    def of_ranks(
        cls, graph: WaitForGraph, numbers: Sequence[int], since: int, reason: str = ""
    ) -> Diagnosis:
        """Return the diagnosis of ranks at fault, with the ranks that wait for them."""
        return cls(
            graph,
            tuple(numbers),
            since,
            build_sides(graph, numbers),
            build_sides(graph, graph.find_waiters(numbers)),
            graph.exits[numbers[0]],
            reason=reason,
        )

    def describe(self) -> list[str]:
        """Put the diagnosis into sentences, the ranks at fault first; escape text from the job."""
        return [*self.describe_cause(), *self.describe_waiting_ranks()]

    def describe_cause(self) -> list[str]:
        """Return the sentences about the cause, without those about the waiting ranks."""
        raise NotImplementedError

    def suggest_fixes(self) -> list[str]:
        """Return the suggested fixes; empty if nothing is wrong."""
        return list(self.fixes)

    # Phrases about the ranks at fault.

    @property
    def subject(self) -> str:
        """The ranks at fault, capitalized: "Rank 5 (pid 812)", "Ranks 0-3, 7"."""
        return self.describe_ranks(self.ranks).capitalize()

    @property
    def is_single(self) -> bool:
        """Return whether one rank is at fault."""
        return len(self.ranks) == 1

    def choose_verb(self, one: str, many: str, past: str) -> str:
        """Choose the form of a verb for the ranks at fault; `past` unless the moment is now."""
        return (one if self.is_single else many) if self.graph.is_live else past

    def conjugate_be(self, ranks: Sequence[int]) -> str:
        """Return the form of "to be" that fits ranks, and the moment."""
        one, many = ("is", "are") if self.graph.is_live else ("was", "were")
        return one if len(ranks) == 1 else many

    @property
    def possessive(self) -> str:
        """The pronoun for a thing of the ranks at fault: "its" or "their"."""
        return "its" if self.is_single else "their"

    def escape_reason(self, limit: int) -> str:
        """Return `reason` for a terminal, with at most `limit` characters."""
        return escape(self.reason, limit)

    def describe_waiting_ranks(self) -> list[str]:
        """Return a sentence about the ranks that wait for those at fault; empty if none do."""
        sides = self.waiting
        if not sides:
            return []
        at_fault = format_ranks(self.ranks) if self.ranks else "it"
        begun = [side.operation.begin for side in sides if side.operation is not None]
        since = self.describe_duration(min(begun, default=0))
        number = "has" if len(sides) == len(sides[0].ranks) == 1 else "have"
        verb = f"{number} waited" if self.graph.is_live else "waited"
        if len(sides) == 1:
            waiting = format_ranks(sides[0].ranks).capitalize()
            return [f"{waiting} {verb} for {at_fault} {self.describe_position(sides[0])}{since}."]
        shown = self.locate_sides(sides[:_MAX_SIDES])
        if more := sum(len(side.ranks) for side in sides[_MAX_SIDES:]):
            shown.append(f"{more} more in other operations")
        return [f"Other ranks {verb} for {at_fault}{since}: {join_texts(shown)}."]

    # Phrases about any ranks.

    def describe_ranks(self, ranks: Sequence[int]) -> str:
        """Format ranks, with the pid if there is only one: "rank 5 (pid 812)"."""
        if len(ranks) != 1:
            return format_ranks(ranks) if ranks else "some rank"
        pid = self.graph.ranks[ranks[0]].pid
        return f"{format_ranks(ranks)} (pid {pid})" if pid else format_ranks(ranks)

    def describe_time(self, time: int) -> str:
        """Format a time: " at 14:03:22", plus " (34 s ago)" while the job runs; "" if unknown."""
        clock = get_clock_offset(self.graph.job)
        if not time or not clock:
            return ""
        ago = f" ({format_duration(self.graph.job.now - time)} ago)"
        return f" at {format_time(time + clock)}" + (ago if self.graph.is_running else "")

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

    def locate_sides(self, sides: Iterable[Side], *, with_verb: bool = False) -> list[str]:
        """Describe the locations of sides: "rank 3 [is] in barrier #3 at a.py:7"."""
        return [
            f"{format_ranks(side.ranks)} "
            f"{f'{self.conjugate_be(side.ranks)} ' if with_verb else ''}"
            f"{self.describe_position(side)}"
            for side in sides
        ]

    def describe_location(self, rank: int) -> str:
        """Describe the location of a rank: ', in barrier #3 at a.py:7, step 17, "evaluating"'."""
        record = self.graph.ranks[rank]
        operation, before = self.graph.current_operation(rank), self.graph.previous_operation(rank)
        text = ", in its own code"
        if operation is not None:
            text = f", {_get_preposition(operation)}{self.describe_operation(rank, operation)}"
        elif before is not None:
            text = f", in its own code after {self.describe_operation(rank, before)}"
        elif self.graph.never_joined(rank):
            text = ", before it joined any group"
        elif not record.opened:  # it has left no record
            text = ""
        text += f", step {record.last_step}" if record.last_step is not None else ""
        note = format_last_note(record)
        return text + (f", {note}" if note else "")

    def describe_single_location(self) -> str:
        """Describe the location of the rank at fault; empty if there are several."""
        return self.describe_location(self.ranks[0]) if self.is_single else ""


class UnknownCause(Diagnosis):
    """The cause cannot be determined."""

    kind = "unknown"
    fixes = (
        "`phalanx jobs` lists all jobs.",
        "Look at the output of the ranks.",
    )

    def describe_cause(self) -> list[str]:
        return [f"The cause is unknown: {self.escape_reason(400)}."]

    @classmethod
    def detect_without_records(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if no rank left a record."""
        ranks = graph.job.ranks
        if any(rank.opened or rank.start is not None for rank in ranks):
            return None
        problems = [f"rank {rank.rank}: {rank.problem}" for rank in ranks if rank.problem]
        problems += graph.job.problems
        return cls(graph, reason="; ".join(problems) or "no rank has left a flight recorder")

    @classmethod
    def detect_long_wait(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if ranks wait for no known rank."""
        if not graph.unexplained_waiters:
            return None
        reason = "ranks wait, but their flight recorders do not show for which ranks"
        return cls(graph, waiting=build_sides(graph, graph.unexplained_waiters), reason=reason)

    @classmethod
    def detect_failed_operation(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if an operation failed for an unknown reason."""
        failure = graph.first_failure
        if failure is None:
            return None
        waiting = build_sides(graph, [failure.rank.rank])
        reason = graph.find_exception() or f"an operation ended with {failure.outcome}"
        return cls(graph, (), graph.moment, waiting=waiting, reason=reason)


def suggest_stack_dump(graph: WaitForGraph, ranks: Sequence[int]) -> str:
    """Suggest to print the Python stack of the first of some ranks."""
    pid = graph.ranks[ranks[0]].pid if ranks else 0
    return (
        f"Print its Python stack: `py-spy dump --pid {pid or 'PID'}` (`pip install py-spy`; "
        "`--native` adds the C++ frames)."
    )


def _get_preposition(operation: Operation) -> str:
    """Return the preposition for an operation that a rank is in; a join is worded as a verb."""
    return "" if operation.kind == "join" else "in "


def build_sides(graph: WaitForGraph, numbers: Iterable[int]) -> tuple[Side, ...]:
    """Group ranks by the point of the program that they were at; the smallest side first."""
    places: dict[object, list[int]] = {}
    for number in numbers:
        places.setdefault(_identify_operation(graph, number), []).append(number)
    sides = []
    for ranks in sorted(places.values(), key=lambda ranks: (len(ranks), ranks)):
        operation = graph.current_operation(ranks[0])
        group = None if operation is None else graph.ranks[ranks[0]].get_group(operation)
        sides.append(Side(tuple(ranks), operation, group))
    return tuple(sides)


def _identify_operation(graph: WaitForGraph, number: int) -> object:
    operation = graph.current_operation(number)
    if operation is None:
        return None
    group = graph.ranks[number].get_group(operation)
    return (
        group and group.identity,
        operation.kind,
        operation.sequence,
        operation.dtype,
        operation.count,
        operation.op,
        graph.get_global_rank(group, operation.peer) if operation.is_message else operation.peer,
        operation.site,
    )
