"""The diagnosis of a job: its evidence, the kinds of diagnoses, and the phrases that word them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from phalanx.observe.diagnosis.exit_reasons import get_clock_offset
from phalanx.observe.diagnosis.formatting import (
    format_call_site,
    format_duration,
    format_last_note,
    format_operation,
    format_ranks,
    format_time,
    get_last_step,
    join_texts,
)
from phalanx.observe.model import get_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.observe.diagnosis.exit_reasons import ExitStatus
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph
    from phalanx.observe.model import Group, Operation

__all__ = [
    "CHECK_BRANCHES",
    "Diagnosis",
    "Kind",
    "Phrases",
    "Rule",
    "Side",
    "build_diagnosis",
    "build_sides",
    "suggest_stack_dump",
]

Kind = Literal[
    "killed",  # a rank was killed by a signal
    "exited",  # a rank ended with an exit code of its own
    "failed",  # a rank ended by an exception
    "vanished",  # a rank's process is gone for an unknown reason
    "stopped",  # a rank is stopped by a signal, and could be continued
    "busy",  # a rank is in its own code while others wait for it
    "late",  # a rank arrived after the deadline of another
    "stuck",  # a rank is in an operation and waits for no other rank
    "branch",  # ranks called operations that do not match
    "message",  # a message does not match its recv
    "finished",  # a rank ended or left while others needed it
    "unsent",  # a rank waits for a message that is never sent
    "unreceived",  # a rank waits for its message to be received
    "unawaited",  # a rank ended or left before its own message was complete
    "unanswered",  # an RPC worker has not answered the call of another worker
    "missing",  # a rank did not join a new group
    "order",  # ranks use groups in different orders
    "deadlock",  # ranks wait for each other
    "aborted",  # a rank aborted the group
    "interrupted",  # a rank was interrupted (Ctrl-C)
    "system",  # the system refused memory or another resource
    "other_host",  # absent ranks are on another host, as are their flight recorders
    "unreadable",  # a rank is absent, and its flight recorder is unreadable
    "launcher",  # the launcher stopped healthy ranks
    "running",  # no failure so far
    "ended",  # ended without a failure
    "unknown",  # the cause cannot be determined
]

_MAX_SIDES = 4
"""Maximum number of sides of waiting ranks that a sentence lists; the table lists all."""

CHECK_BRANCHES = (
    "Check the conditions that lead to these lines: `if rank == ...`, a loop whose length depends "
    "on the data, an exception that only one rank catches. Every rank must call the same "
    "collectives of a group in the same order, with the same dtype, size, root and operator."
)
"""A suggested fix for ranks that call different operations."""


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
    """The ranks at fault, and the evidence against them.

    Attributes:
        kind: The kind of failure.
        ranks: The numbers of the ranks at fault. For `branch`, `order` and `deadlock`: the ranks in
            the minority, or all ranks concerned if there is no minority. For `unsent`: the waiting
            ranks.
        since: The time at which the state began, in nanoseconds of the monotonic clock; 0 if
            unknown.
        sides: The ranks by the point of the program that they had reached: those at fault first,
            then others concerned. In a cycle, each side waits for the next.
        waiting: The ranks that waited for those at fault, directly or indirectly.
        exit_status: The end of the (first) rank at fault, or that it is alive; None if not
            applicable.
        instead: A message that was sent in place of the awaited one.
        reason: Text from the job: the exception, the reason for an abort, or why the cause is
            unknown.
    """

    kind: Kind
    ranks: tuple[int, ...] = ()
    since: int = 0
    sides: tuple[Side, ...] = ()
    waiting: tuple[Side, ...] = ()
    exit_status: ExitStatus | None = None
    instead: Operation | None = None
    reason: str = ""


class Rule:
    """A kind of diagnosis: its detection, its description and the suggested fixes.

    Most rules have a static method `detect`, which returns a diagnosis, or None. The other kinds
    are found by functions that choose among several kinds. `rules` lists both in the order in which
    they are tried.

    Attributes:
        kind: The kind of the diagnosis.
        fixes: The suggested fixes if they are always the same: concrete steps, the most likely
            first.
    """

    kind: ClassVar[Kind]
    fixes: ClassVar[tuple[str, ...]] = ()

    def describe(self, phrases: Phrases) -> list[str]:
        """Put the diagnosis into sentences, the ranks at fault first; escape text from the job."""
        raise NotImplementedError

    def suggest_fixes(self, phrases: Phrases) -> list[str]:  # noqa: ARG002
        """Return the suggested fixes; empty if nothing is wrong."""
        return list(self.fixes)


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

    def describe_sides(self, sides: Iterable[Side]) -> list[str]:
        """Describe the locations of sides: "rank 3 is in barrier #3 at a.py:7"."""
        return [
            f"{format_ranks(side.ranks)} {self.conjugate_be(side.ranks)} "
            f"{self.describe_position(side)}"
            for side in sides
        ]

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


def build_diagnosis(
    graph: WaitForGraph, kind: Kind, numbers: Sequence[int], since: int, reason: str = ""
) -> Diagnosis:
    """Build a diagnosis of ranks at fault, with the ranks that wait for them."""
    return Diagnosis(
        kind,
        tuple(numbers),
        since,
        build_sides(graph, numbers),
        build_sides(graph, graph.find_waiters(numbers)),
        exit_status=graph.exits[numbers[0]],
        reason=reason,
    )


def build_sides(graph: WaitForGraph, numbers: Iterable[int]) -> tuple[Side, ...]:
    """Group ranks by the point of the program that they were at; the smallest side first."""
    places: dict[object, list[int]] = {}
    for number in numbers:
        places.setdefault(_identify_operation(graph, number), []).append(number)
    ordered = sorted(places.values(), key=lambda ranks: (len(ranks), ranks))
    return tuple(_build_side(graph, ranks) for ranks in ordered)


def _build_side(graph: WaitForGraph, ranks: list[int]) -> Side:
    first = ranks[0]
    operation = graph.current_operation(first)
    group = None if operation is None else get_group(graph.ranks[first], operation)
    return Side(tuple(ranks), operation, group)


def _identify_operation(graph: WaitForGraph, number: int) -> object:
    operation = graph.current_operation(number)
    if operation is None:
        return None
    group = get_group(graph.ranks[number], operation)
    peer = graph.get_global_rank(group, operation.peer) if operation.is_message else operation.peer
    return (
        group and group.identity,
        operation.kind,
        operation.sequence,
        operation.dtype,
        operation.count,
        operation.op,
        peer,
        operation.site,
    )
