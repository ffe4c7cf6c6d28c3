"""Operations that do not match: different calls of ranks, and messages that do not fit."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.diagnosis import CHECK_BRANCHES, Diagnosis, Rule, Side
from phalanx.observe.diagnosis.formatting import format_ranks, join_texts
from phalanx.observe.diagnosis.messages import find_mismatched_message
from phalanx.observe.escape import escape
from phalanx.observe.model import get_group

if TYPE_CHECKING:
    from phalanx.observe.diagnosis.diagnosis import Phrases
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph
    from phalanx.observe.model import Group, Operation

__all__ = ["MismatchedMessage", "MismatchedOperation"]


class MismatchedOperation(Rule):
    """Ranks called operations that do not match."""

    kind = "branch"
    fixes = (CHECK_BRANCHES, "`phalanx trace` shows the earlier operations of each rank.")

    @staticmethod
    def detect(graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if the first failure is a mismatch, of operations or of a message."""
        failure = graph.first_failure
        if failure is None or failure.outcome != "mismatch":
            return None
        group = get_group(failure.rank, failure.operation)
        failed = [
            number for number in sorted(graph.failures) if _has_mismatch(graph, number, group)
        ]
        messages = [number for number in failed if graph.failures[number].operation.is_message]
        collectives = [number for number in failed if number not in messages]
        if len({_get_signature(graph.failures[n].operation) for n in collectives}) < 2:
            for number in messages:
                if (diagnosis := _diagnose_mismatched_message(graph, number)) is not None:
                    return diagnosis
        sides = _build_mismatch_sides(graph, _select_latest(graph, collectives) or failed)
        return Diagnosis(
            "branch",
            _find_minority_callers(sides),
            graph.moment,
            sides,
            reason=graph.find_exception(),
        )

    def describe(self, phrases: Phrases) -> list[str]:
        sides, at_fault = phrases.diagnosis.sides, phrases.diagnosis.ranks
        own = [side for side in sides if set(side.ranks) <= set(at_fault)]
        rest = [
            f"{format_ranks(side.ranks)} called {phrases.describe_call(side)}"
            for side in sides
            if side not in own
        ]
        time, reason = (
            phrases.describe_time(phrases.diagnosis.since),
            escape(phrases.diagnosis.reason, 400),
        )
        if rest and len(own) == 1:
            it = "it" if len(at_fault) == 1 else "they"
            called = f"{it} called {phrases.describe_call(own[0])}, but {join_texts(rest)}"
            return [f"{phrases.subject} took a different branch than the others{time}: {called}."]
        calls = [
            f"{format_ranks(side.ranks)} called {phrases.describe_call(side)}" for side in own
        ] + rest
        first = f"Ranks took different branches{time}: {join_texts(calls)}."
        return [first, *([reason] if len(calls) == 1 and reason else [])]


class MismatchedMessage(Rule):
    """A message does not match its recv."""

    kind = "message"
    fixes = ("Use the same dtype and number of elements for send and recv.",)

    def describe(self, phrases: Phrases) -> list[str]:
        receiver, sender = phrases.diagnosis.sides
        return [
            f"A message does not match its recv: {format_ranks(sender.ranks)} called "
            f"{phrases.describe_call(sender)}, "
            f"but {format_ranks(receiver.ranks)} called {phrases.describe_call(receiver)}."
        ]


def _has_mismatch(graph: WaitForGraph, number: int, group: Group | None) -> bool:
    """Return whether a rank failed because of a mismatch in this group."""
    failure = graph.failures[number]
    own = get_group(failure.rank, failure.operation)
    same = own is not None and group is not None and own.identity == group.identity
    return failure.outcome == "mismatch" and (same or failure is graph.first_failure)


def _diagnose_mismatched_message(graph: WaitForGraph, number: int) -> Diagnosis | None:
    """Return a diagnosis if a message does not match the recv of this rank."""
    recv = graph.failures[number].operation
    found = find_mismatched_message(graph, number, recv) if recv.kind == "recv" else None
    if found is None:
        return None
    sender, sent = found
    sides = (
        _build_side(graph, [number]),
        Side((sender,), sent, get_group(graph.ranks[sender], sent)),
    )
    return Diagnosis("message", tuple(sorted((number, sender))), graph.moment, sides, instead=sent)


def _select_latest(graph: WaitForGraph, numbers: list[int]) -> list[int]:
    """Return the ranks in the latest collective; the others were notified in an earlier one."""
    sequences = {number: graph.failures[number].operation.sequence for number in numbers}
    return [n for n, sequence in sequences.items() if sequence == max(sequences.values())]


def _get_signature(operation: Operation) -> tuple[object, ...]:
    """Return the arguments that must be the same on all ranks of a collective."""
    return (
        operation.sequence,
        operation.kind,
        operation.dtype,
        operation.count,
        operation.peer,
        operation.op,
    )


def _build_mismatch_sides(graph: WaitForGraph, numbers: list[int]) -> tuple[Side, ...]:
    """Return the sides of a mismatch, the rarest call first.

    Ranks that made the same call at the same call site form one side.
    """
    places: dict[tuple[object, str], list[int]] = {}
    alike: Counter[object] = Counter()
    for number in numbers:
        operation = graph.failures[number].operation
        places.setdefault((_get_signature(operation), operation.site), []).append(number)
        alike[_get_signature(operation)] += 1
    ordered = sorted(places, key=lambda place: (alike[place[0]], places[place]))
    return tuple(_build_side(graph, places[place]) for place in ordered)


def _build_side(graph: WaitForGraph, ranks: list[int]) -> Side:
    failure = graph.failures[ranks[0]]
    return Side(tuple(ranks), failure.operation, get_group(failure.rank, failure.operation))


def _find_minority_callers(sides: tuple[Side, ...]) -> tuple[int, ...]:
    """Return the ranks that made the rarest call; all ranks if several calls are equally rare."""
    callers: dict[object, list[int]] = {}
    for side in sides:
        signature = None if side.operation is None else _get_signature(side.operation)
        callers.setdefault(signature, []).extend(side.ranks)
    few = min(len(ranks) for ranks in callers.values())
    fewest = [ranks for ranks in callers.values() if len(ranks) == few]
    named = fewest[0] if len(fewest) == 1 else [n for ranks in callers.values() for n in ranks]
    return tuple(sorted(named))
