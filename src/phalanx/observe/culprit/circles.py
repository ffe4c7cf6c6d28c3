"""Ranks that wait for each other in a circle: a deadlock, and who of them is out of step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from phalanx.observe.culprit.messages import unsent
from phalanx.observe.culprit.verdict import Side, Verdict, sides_of
from phalanx.observe.culprit.waits import group_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.observe.culprit.verdict import Kind
    from phalanx.observe.culprit.waits import Scene

__all__ = ["deadlock", "find_circle"]


def find_circle(scene: Scene, waiters: Sequence[int]) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first; empty: there are none."""
    stuck = {*waiters}
    while free := {number for number in stuck if not _is_stuck(scene, number, stuck)}:
        stuck -= free
    if not stuck:
        return []
    # Every rank of these waits for another of them: so the walk comes back to where it was.
    number, seen = min(stuck), set[int]()
    while number not in seen:
        seen.add(number)
        number = min(stuck.intersection(scene.waits[number].peers))
    return _shortest(scene, number, stuck)


def deadlock(scene: Scene, circle: list[int], waiters: Sequence[int]) -> Verdict:
    """What a circle means, and who is in the minority among all that wait."""
    operations = [scene.waits[number].operation for number in circle]
    single = [operation.is_message for operation in operations]
    if any(single) and not all(single):
        return _message_and_collective(scene, circle, waiters)
    if all(single):
        kind: Kind = "deadlock"
        sides = tuple(sides_of(scene, [number])[0] for number in circle)
    else:
        joins = any(operation.kind == "join" for operation in operations)
        kind = "order" if len(_groups(scene, circle)) > 1 and not joins else "deadlock"
        sides = sides_of(scene, _concerned(scene, circle, waiters))
    culprits = tuple(sorted(_minority(sides)))
    others = [n for n in scene.waiting_for(circle) if all(n not in side.ranks for side in sides)]
    since = max(operation.begin for operation in operations)
    return Verdict(kind, culprits, since, sides, sides_of(scene, others))


def _is_stuck(scene: Scene, number: int, stuck: set[int]) -> bool:
    wait = scene.waits[number]
    peers = stuck.intersection(wait.peers)
    return len(peers) == len(wait.peers) > 0 if wait.any_of else bool(peers)


def _shortest(scene: Scene, start: int, stuck: set[int]) -> list[int]:
    """The shortest circle through `start`, which begins with its smallest rank."""
    ways = deque([[start]])
    seen: set[int] = set()
    while ways:
        way = ways.popleft()
        for peer in sorted(stuck.intersection(scene.waits[way[-1]].peers)):
            if peer == start:
                first = way.index(min(way))
                return way[first:] + way[:first]
            if peer not in seen:
                seen.add(peer)
                ways.append([*way, peer])
    return []


def _concerned(scene: Scene, circle: list[int], waiters: Sequence[int]) -> list[int]:
    """All ranks that wait in one of the operations of the circle."""
    places = {_place(scene, number) for number in circle}
    return [number for number in sorted(waiters) if _place(scene, number) in places]


def _place(scene: Scene, number: int) -> tuple[object, ...]:
    operation = scene.waits[number].operation
    group = group_of(scene.ranks[number], operation)
    return (group and group.identity, operation.kind, operation.sequence)


def _groups(scene: Scene, circle: list[int]) -> set[object]:
    return {_place(scene, number)[0] for number in circle}


def _minority(sides: Sequence[Side]) -> tuple[int, ...]:
    """The ranks of the smallest side; of all sides if it isn't the only one of that size."""
    sizes = sorted(len(side.ranks) for side in sides)
    if len(sizes) > 1 and sizes[0] < sizes[1]:
        return next(side.ranks for side in sides if len(side.ranks) == sizes[0])
    return tuple(number for side in sides for number in side.ranks)


def _message_and_collective(scene: Scene, circle: list[int], waiters: Sequence[int]) -> Verdict:
    """One waits for a message, the other is elsewhere and waits for the first."""
    for kind in ("recv", "send"):
        for number, peer in zip(circle, circle[1:] + circle[:1], strict=True):
            operation = scene.waits[number].operation
            if operation.kind != kind or scene.waits[peer].operation.is_message:
                continue
            same = [n for n in waiters if scene.waits[n].peers == (peer,)]
            alike = [n for n in same if scene.waits[n].operation.kind == kind] or [number]
            if kind == "recv":
                return unsent(scene, alike, peer)
            sides = (*sides_of(scene, alike), *sides_of(scene, [peer]))
            return Verdict("unreceived", tuple(alike), operation.begin, sides)
    return Verdict("deadlock", tuple(circle), 0, sides_of(scene, circle))
