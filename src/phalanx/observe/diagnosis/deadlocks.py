"""Cycles in the wait-for graph: deadlocks, and the ranks in the minority."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.blocked_ranks import MissingRank
from phalanx.observe.diagnosis.diagnosis import CHECK_BRANCHES, Diagnosis, Side, build_sides
from phalanx.observe.diagnosis.formatting import join_texts
from phalanx.observe.diagnosis.mismatches import UnreceivedMessage, UnsentMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.observe.wait_for_graph import WaitForGraph

__all__ = ["Deadlock", "GroupOrder", "check_cycle"]


class GroupOrder(Diagnosis):
    """Ranks use groups in different orders."""

    kind = "order"
    fixes = (
        "Use groups in the same order on every rank, or start the operations with `async_op=True` "
        "and wait for all of them afterwards.",
    )

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if ranks waited for each other and one of them detected it."""
        if graph.first_failure is None or graph.first_failure.outcome != "deadlock":
            return None
        groups = [group for rank in graph.ranks.values() for group in rank.groups]
        reasons = [group.abort_reason for group in groups if group.abort_reason]
        reason = reasons[0] if reasons else graph.find_exception()
        waiting = sorted(graph.waits)
        return cls(graph, tuple(waiting), graph.moment, build_sides(graph, waiting), reason=reason)

    def describe_cause(self) -> list[str]:
        places = join_texts(self.locate_sides(self.sides, with_verb=True))
        since = self.describe_duration(self.since)
        wait = "has waited" if self.graph.is_live else "waited"
        texts = [
            f"Ranks use groups in different orders: {places}.",
            f"Each side {wait} for the other{since}.",
        ]
        if len(self.ranks) < sum(len(side.ranks) for side in self.sides):
            texts.append(f"{self.subject} {self.conjugate_be(self.ranks)} in the minority.")
        return texts


class Deadlock(Diagnosis):
    """Ranks wait for each other."""

    kind = "deadlock"
    fixes = (
        "Let one side go first, or use `isend` and `irecv` (`batch_isend_irecv`) and wait after "
        "both are posted.",
        CHECK_BRANCHES,
    )

    def describe_cause(self) -> list[str]:
        places = join_texts(self.locate_sides(self.sides[:6]))
        verb = "have waited" if self.graph.is_live else "waited"
        since = self.describe_duration(self.since)
        return [f"Ranks {verb} for each other{since}: {places}."]


def check_cycle(graph: WaitForGraph) -> Diagnosis | None:
    """Return the diagnosis of a cycle, if any, with the minority among the waiting ranks."""
    waiters = graph.blocked
    cycle = graph.find_cycle(waiters)
    if not cycle:
        return None
    operations = [graph.waits[number].operation for number in cycle]
    single = [operation.is_message for operation in operations]
    if any(single) and not all(single):
        return _diagnose_mixed_cycle(graph, cycle, waiters)
    since = max(operation.begin for operation in operations)
    if absent := _find_absent_from_new_group(graph, cycle):
        return MissingRank.of_ranks(graph, absent, since)
    kind: type[Diagnosis] = Deadlock
    if all(single):
        sides = tuple(build_sides(graph, [number])[0] for number in cycle)
    else:
        places = {_identify_operation(graph, number) for number in cycle}
        has_joins = any(operation.kind == "join" for operation in operations)
        if len({place[0] for place in places}) > 1 and not has_joins:
            kind = GroupOrder
        concerned = [number for number in waiters if _identify_operation(graph, number) in places]
        sides = build_sides(graph, concerned)
    at_fault = tuple(sorted(_find_minority(sides)))
    others = [n for n in graph.find_waiters(cycle) if all(n not in side.ranks for side in sides)]
    return kind(graph, at_fault, since, sides, build_sides(graph, others))


def _find_absent_from_new_group(graph: WaitForGraph, cycle: list[int]) -> list[int]:
    """Return the ranks that are in other operations while others wait for them to join a group."""
    joining = [number for number in cycle if graph.is_joining(number)]
    awaited = {peer for number in joining for peer in graph.waits[number].peers}
    return sorted(n for n in awaited if n in graph.waits and not graph.is_joining(n))


def _identify_operation(graph: WaitForGraph, number: int) -> tuple[object, ...]:
    operation = graph.waits[number].operation
    group = graph.ranks[number].get_group(operation)
    return (group and group.identity, operation.kind, operation.sequence)


def _find_minority(sides: Sequence[Side]) -> tuple[int, ...]:
    """Return the ranks of the smallest side; of all sides if several are equally small."""
    sizes = sorted(len(side.ranks) for side in sides)
    if len(sizes) > 1 and sizes[0] < sizes[1]:
        return next(side.ranks for side in sides if len(side.ranks) == sizes[0])
    return tuple(number for side in sides for number in side.ranks)


def _diagnose_mixed_cycle(
    graph: WaitForGraph, cycle: list[int], waiters: Sequence[int]
) -> Diagnosis:
    """Return the diagnosis of a cycle that mixes messages and other operations."""
    for kind in ("recv", "send"):
        for number, peer in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            operation = graph.waits[number].operation
            if operation.kind != kind or graph.waits[peer].operation.is_message:
                continue
            same = [n for n in waiters if graph.waits[n].peers == (peer,)]
            alike = [n for n in same if graph.waits[n].operation.kind == kind] or [number]
            if kind == "recv":
                return UnsentMessage.between(graph, alike, peer)
            sides = (*build_sides(graph, alike), *build_sides(graph, [peer]))
            return UnreceivedMessage(graph, tuple(alike), operation.begin, sides)
    return Deadlock(graph, tuple(cycle), 0, build_sides(graph, cycle))
