"""What is found out about a job: who is the culprit, of what kind, and the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phalanx.observe.culprit.waits import group_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.observe.culprit.endings import End
    from phalanx.observe.culprit.waits import Scene
    from phalanx.observe.model import Group, Operation

__all__ = ["Kind", "Side", "Verdict", "sides_of"]

Kind = Literal[
    "killed",  # a rank was killed by a signal
    "exited",  # a rank ended with an exit code of its own
    "failed",  # a rank ended by an exception
    "vanished",  # a rank's process is gone, and nobody knows how
    "stopped",  # a rank is stopped by a signal: it could be continued
    "busy",  # a rank is in code of its own while others wait for it
    "late",  # a rank came, but after the deadline of another
    "stuck",  # a rank is inside of an operation and waits for nobody
    "branch",  # ranks called operations that don't fit together
    "message",  # a message that doesn't fit the recv
    "finished",  # a rank ended or left while others needed it
    "unsent",  # a rank waits for a message that nobody sends
    "unreceived",  # a rank waits for somebody to take its message
    "missing",  # a rank did not come when a group was formed
    "order",  # ranks use groups in different orders
    "deadlock",  # ranks wait for each other
    "aborted",  # a rank aborted the group
    "interrupted",  # a rank was interrupted (Ctrl-C)
    "system",  # the system refused memory or something else
    "elsewhere",  # ranks of another host don't come, whose black boxes are there
    "unreadable",  # a rank doesn't come, and its black box can't be read
    "launcher",  # the launcher stopped ranks that nothing was wrong with
    "running",  # nothing is wrong, so far
    "ended",  # nothing was wrong
    "unknown",  # can't tell
]


@dataclass(frozen=True)
class Side:
    """Ranks that were at the same place of the program.

    Attributes:
        ranks: Their numbers in the job.
        operation: What they were in; None for code of their own.
        group: The operation's group, as the first of them knows it.
    """

    ranks: tuple[int, ...]
    operation: Operation | None = None
    group: Group | None = None


@dataclass(frozen=True)
class Verdict:
    """Who is the culprit, and why.

    Attributes:
        kind: What kind of trouble it is.
        ranks: The culprits, by their number in the job. Of `branch`, `order` and `deadlock`: those
            in the minority, or all concerned if there is none. Of `unsent`: who waits.
        since: Since when, in nanoseconds of the monotonic clock; 0 if that isn't known.
        sides: Who was where: the culprits first, then others concerned. In a circle of ranks that
            wait for each other, each waits for the next.
        waiting: Who waited for the culprits, directly or not.
        end: How the (first) culprit ended, if it did.
        instead: A message that was sent, but isn't the one that is waited for.
        reason: In words of the job's: the exception, the reason of an abort; why it can't be told.
    """

    kind: Kind
    ranks: tuple[int, ...] = ()
    since: int = 0
    sides: tuple[Side, ...] = ()
    waiting: tuple[Side, ...] = ()
    end: End | None = None
    instead: Operation | None = None
    reason: str = ""


def sides_of(scene: Scene, numbers: Iterable[int]) -> tuple[Side, ...]:
    """Put ranks together that were at the same place; the smallest side first."""
    places: dict[object, list[int]] = {}
    for number in numbers:
        places.setdefault(_place(scene, number), []).append(number)
    ordered = sorted(places.values(), key=lambda ranks: (len(ranks), ranks))
    return tuple(_side(scene, ranks) for ranks in ordered)


def _side(scene: Scene, ranks: list[int]) -> Side:
    first = ranks[0]
    operation = scene.under_way(first)
    group = None if operation is None else group_of(scene.ranks[first], operation)
    return Side(tuple(ranks), operation, group)


def _place(scene: Scene, number: int) -> object:
    operation = scene.under_way(number)
    if operation is None:
        return None
    group = group_of(scene.ranks[number], operation)
    peer = scene.member(group, operation.peer) if operation.is_message else operation.peer
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
