"""The diagnosis of a job: the ranks at fault, the kind of failure, and the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phalanx.observe.diagnosis.wait_for_graph import get_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.observe.diagnosis.exit_reasons import ExitStatus
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph
    from phalanx.observe.model import Group, Operation

__all__ = ["Diagnosis", "Kind", "Side", "build_diagnosis", "build_sides"]

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
