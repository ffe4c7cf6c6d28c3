"""Cycles in the wait-for graph: deadlocks, and the ranks in the minority."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.diagnosis import (
    CHECK_BRANCHES,
    Diagnosis,
    Rule,
    Side,
    build_diagnosis,
    build_sides,
)
from phalanx.observe.diagnosis.formatting import format_ranks, join_texts
from phalanx.observe.diagnosis.messages import diagnose_unsent_message
from phalanx.observe.model import get_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.observe.diagnosis.diagnosis import Kind, Phrases
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph

__all__ = ["Deadlock", "GroupOrder", "diagnose_deadlock", "find_cycle"]


class GroupOrder(Rule):
    """Ranks use groups in different orders."""

    kind = "order"
    fixes = (
        "Use groups in the same order on every rank, or start the operations with `async_op=True` "
        "and wait for all of them afterwards.",
    )

    @staticmethod
    def detect(graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if ranks waited for each other and one of them detected it."""
        if graph.first_failure is None or graph.first_failure.outcome != "deadlock":
            return None
        groups = [group for rank in graph.ranks.values() for group in rank.groups]
        reason = next(
            (group.abort_reason for group in groups if group.abort_reason), graph.find_exception()
        )
        sides = build_sides(graph, sorted(graph.waits))
        return Diagnosis("order", tuple(sorted(graph.waits)), graph.moment, sides, reason=reason)

    def describe(self, phrases: Phrases) -> list[str]:
        diagnosis = phrases.diagnosis
        places = phrases.describe_sides(diagnosis.sides)
        first = f"Ranks use groups in different orders: {join_texts(places)}."
        since = phrases.describe_duration(diagnosis.since)
        each = f"Each side {phrases.choose_tense('has waited', 'waited')} for the other{since}."
        minority = len(diagnosis.ranks) < sum(len(side.ranks) for side in diagnosis.sides)
        last = [f"{phrases.subject} {phrases.conjugate_be()} in the minority."] if minority else []
        return [first, each, *last, *phrases.describe_waiting_ranks()]


class Deadlock(Rule):
    """Ranks wait for each other."""

    kind = "deadlock"
    fixes = (
        "Let one side go first, or use `isend` and `irecv` (`batch_isend_irecv`) and wait after "
        "both are posted.",
        CHECK_BRANCHES,
    )

    def describe(self, phrases: Phrases) -> list[str]:
        places = [
            f"{format_ranks(side.ranks)} {phrases.describe_position(side)}"
            for side in phrases.diagnosis.sides[:6]
        ]
        verb = phrases.choose_tense("have waited", "waited")
        since = phrases.describe_duration(phrases.diagnosis.since)
        return [
            f"Ranks {verb} for each other{since}: {join_texts(places)}.",
            *phrases.describe_waiting_ranks(),
        ]


def find_cycle(graph: WaitForGraph, waiters: Sequence[int]) -> list[int]:
    """Return a cycle of ranks, each waiting for the next; empty if there is none."""
    stuck = {*waiters}
    while free := {number for number in stuck if not _is_stuck(graph, number, stuck)}:
        stuck -= free
    if not stuck:
        return []
    # Each of these ranks waits for another of them, so the walk visits some rank twice.
    number, seen = min(stuck), set[int]()
    while number not in seen:
        seen.add(number)
        number = min(stuck.intersection(graph.waits[number].peers))
    return _find_shortest_cycle(graph, number, stuck)


def diagnose_deadlock(graph: WaitForGraph, cycle: list[int], waiters: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of a cycle, with the minority among the waiting ranks."""
    operations = [graph.waits[number].operation for number in cycle]
    single = [operation.is_message for operation in operations]
    if any(single) and not all(single):
        return _diagnose_mixed_cycle(graph, cycle, waiters)
    if absent := _find_absent_from_new_group(graph, cycle):
        return build_diagnosis(graph, "missing", absent, max(each.begin for each in operations))
    if all(single):
        kind: Kind = "deadlock"
        sides = tuple(build_sides(graph, [number])[0] for number in cycle)
    else:
        joins = any(operation.kind == "join" for operation in operations)
        kind = "order" if len(_get_groups(graph, cycle)) > 1 and not joins else "deadlock"
        sides = build_sides(graph, _find_concerned(graph, cycle, waiters))
    at_fault = tuple(sorted(_find_minority(sides)))
    others = [n for n in graph.find_waiters(cycle) if all(n not in side.ranks for side in sides)]
    since = max(operation.begin for operation in operations)
    return Diagnosis(kind, at_fault, since, sides, build_sides(graph, others))


def _find_absent_from_new_group(graph: WaitForGraph, cycle: list[int]) -> list[int]:
    """Return the ranks that are in other operations while others wait for them to join a group."""
    joining = [number for number in cycle if graph.is_joining(number)]
    awaited = {peer for number in joining for peer in graph.waits[number].peers}
    return sorted(n for n in awaited if n in graph.waits and not graph.is_joining(n))


def _is_stuck(graph: WaitForGraph, number: int, stuck: set[int]) -> bool:
    wait = graph.waits[number]
    peers = stuck.intersection(wait.peers)
    return len(peers) == len(wait.peers) > 0 if wait.any_of else bool(peers)


def _find_shortest_cycle(graph: WaitForGraph, start: int, stuck: set[int]) -> list[int]:
    """Return the shortest cycle through `start`, rotated to begin with its smallest rank."""
    paths = deque([[start]])
    seen: set[int] = set()
    while paths:
        path = paths.popleft()
        for peer in sorted(stuck.intersection(graph.waits[path[-1]].peers)):
            if peer == start:
                first = path.index(min(path))
                return path[first:] + path[:first]
            if peer not in seen:
                seen.add(peer)
                paths.append([*path, peer])
    return []


def _find_concerned(graph: WaitForGraph, cycle: list[int], waiters: Sequence[int]) -> list[int]:
    """Return all ranks that wait in an operation of the cycle."""
    places = {_identify_operation(graph, number) for number in cycle}
    return [number for number in sorted(waiters) if _identify_operation(graph, number) in places]


def _identify_operation(graph: WaitForGraph, number: int) -> tuple[object, ...]:
    operation = graph.waits[number].operation
    group = get_group(graph.ranks[number], operation)
    return (group and group.identity, operation.kind, operation.sequence)


def _get_groups(graph: WaitForGraph, cycle: list[int]) -> set[object]:
    return {_identify_operation(graph, number)[0] for number in cycle}


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
                return diagnose_unsent_message(graph, alike, peer)
            sides = (*build_sides(graph, alike), *build_sides(graph, [peer]))
            return Diagnosis("unreceived", tuple(alike), operation.begin, sides)
    return Diagnosis("deadlock", tuple(cycle), 0, build_sides(graph, cycle))
