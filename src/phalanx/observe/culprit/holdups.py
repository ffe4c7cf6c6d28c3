"""Ranks that wait, and what it is that they all wait for in the end.

Whoever waits is followed to those that it waits for, and so on. The way ends at a rank that doesn't
wait: it is why the others do. Or it ends nowhere: then ranks wait for each other (`circles`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from phalanx.observe.culprit.circles import deadlock, find_circle
from phalanx.observe.culprit.endings import last_sign, told_of
from phalanx.observe.culprit.messages import other_message, unsent
from phalanx.observe.culprit.verdict import Verdict, sides_of
from phalanx.observe.culprit.waits import group_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.observe.culprit.verdict import Kind
    from phalanx.observe.culprit.waits import Scene

__all__ = ["LONG", "held_up", "in_own_code", "is_elsewhere", "is_stopped", "lost", "stopped"]

_WAITED = re.compile(r"\bwaited for ((?:rank \d{1,5}(?: \([^)]*\))?(?:, )?)+)")
_RANK = re.compile(r"rank (\d{1,5})")
_STOPPED = re.compile(r"\brank (\d{1,5}) is stopped by a signal\b")

LONG = 1_000_000_000
"""Nanoseconds after which a wait is looked into, in a job in which nothing has failed."""


def held_up(scene: Scene) -> Verdict | None:
    """What ranks wait for, if they have waited long or in vain."""
    waiters = [number for number in scene.waits if _in_vain(scene, number)]
    if not waiters:
        return None
    reached = _reachable(scene, waiters)
    ends = sorted(number for number in reached if not _waits_on(scene, number))
    found = (
        _lost(scene, ends)
        or stopped(scene, ends)
        or _missing(scene, ends)
        or _circle(scene, sorted(reached - {*ends}))
        or _wrong_message(scene, ends)
        or _elsewhere(scene, ends)
    )
    if found:
        return found
    ends = [number for number in ends if not is_elsewhere(scene, number)]
    return (
        _unreadable(scene, ends)
        or _late(scene, ends)
        or _busy(scene, ends)
        or _stuck(scene, ends, waiters)
    )


def in_own_code(scene: Scene, number: int) -> int:
    """Since when a rank had been in code of its own at the moment; 0 if it has no black box."""
    before = scene.before(number)
    return scene.ranks[number].opened if before is None else before.end


def _in_vain(scene: Scene, number: int) -> bool:
    """Whether a wait is worth a look: it was cut short by trouble, or is long."""
    if scene.gone(number):
        return False
    operation = scene.waits[number].operation
    outcome = "ok" if scene.trouble is None else scene.trouble.outcome
    cut = operation.outcome != "ok" and outcome not in ("ok", "interrupted")
    return cut or scene.moment - operation.begin >= LONG


def _waits_on(scene: Scene, number: int) -> bool:
    """Whether it is others that keep a rank from going on."""
    wait = scene.waits.get(number)
    still = scene.gone(number) or is_stopped(scene, number)
    return wait is not None and bool(wait.peers) and not still


def _reachable(scene: Scene, start: Iterable[int]) -> set[int]:
    found: set[int] = set()
    todo = [*start]
    while todo:
        number = todo.pop()
        if number in found or number not in scene.ranks:
            continue
        found.add(number)
        if _waits_on(scene, number):
            todo += scene.waits[number].peers
    return found


# What ranks are that don't wait, from the plainest to the vaguest.


def _lost(scene: Scene, ends: list[int]) -> Verdict | None:
    gone = [number for number in ends if scene.gone(number)]
    return lost(scene, gone) if gone else None


def lost(scene: Scene, gone: list[int]) -> Verdict:
    """Ranks that have ended, or left, and that others need."""
    first = min(gone, key=lambda number: _order(scene, number))
    end = scene.ends[first]
    alike = tuple(number for number in gone if scene.ends[number].how == end.how)
    # The first exception is the cause; a signal, or the end of the script, may come to many.
    culprits = (first,) if end.how in ("failed", "exited") else alike
    waiting = scene.waiting_for(culprits)
    kind = _KINDS.get(end.how, "finished")
    for number in waiting if kind == "finished" else ():
        operation = scene.waits[number].operation
        if operation.kind == "recv" and operation.peer >= 0:
            return unsent(scene, [number], first)
    return Verdict(
        kind,
        culprits,
        end.time,
        sides_of(scene, culprits),
        sides_of(scene, waiting),
        end=end,
        reason=scene.ranks[first].last_words,
    )


_KINDS: dict[str, Kind] = {
    "failed": "failed",
    "killed": "killed",
    "exited": "exited",
    "vanished": "vanished",
}


def _order(scene: Scene, number: int) -> tuple[int, int, float, int]:
    """Those first of whom it is known how they ended; of those the earliest."""
    end, rank = scene.ends[number], scene.ranks[number]
    doubt = 2 if end.how not in _KINDS else 1 if end.how == "vanished" else 0
    # Where no box says what the monotonic clock was, the launcher's clock still has an order.
    noted = rank.start.ended if rank.start is not None else None
    return doubt, end.time or last_sign(rank), noted or 0.0, number


def stopped(scene: Scene, numbers: Iterable[int]) -> Verdict | None:
    """Those of the ranks that are stopped by a signal."""
    found = [number for number in numbers if is_stopped(scene, number)]
    if not found:
        return None
    since = max(last_sign(scene.ranks[number]) for number in found)
    return _of(scene, "stopped", found, since)


def is_stopped(scene: Scene, number: int) -> bool:
    """Whether a rank is stopped by a signal, or was until its launcher killed it."""
    process = scene.ranks[number].process
    if process is not None and process.state == "stopped":
        return True
    return _deaf(scene, number) or _seen_stopped(scene, number)


def _deaf(scene: Scene, number: int) -> bool:
    """Whether the signal that ended others did nothing to a rank, as to one that is stopped.

    Of a rank that others waited for until a deadline, their errors say whether it was.
    """
    end = scene.ends[number]
    if scene.trouble is not None or end.how != "launcher" or end.code != -9:
        return False
    others = [other for other in scene.ends.values() if other.by_others]
    if _without_box(scene, number):
        # It can't say that it was interrupted, and the end of an interpreter takes its time.
        others = [other for other in others if other.how != "interrupted"]
    return any(other.how == "interrupted" or other.code != -9 for other in others)


def _seen_stopped(scene: Scene, number: int) -> bool:
    """Whether the error of another rank says that this one was stopped."""
    return any(
        scene.member(group_of(trouble.rank, trouble.operation), int(place)) == number
        for trouble in scene.troubles.values()
        for place in _STOPPED.findall(trouble.rank.last_words)
    )


def _missing(scene: Scene, ends: list[int]) -> Verdict | None:
    """Ranks that never came to form a group, for which others wait there."""
    joining = [wait for wait in scene.waits.values() if scene.joining(wait.rank)]
    awaited = {number for wait in joining for number in wait.peers}
    found = [n for n in ends if n in awaited and _without_box(scene, n)]
    found = [n for n in found if not scene.ranks[n].problem and not _formed_one(scene, n)]
    begun = [wait.operation.begin for wait in joining]
    return _of(scene, "missing", found, min(begun)) if found else None


def _without_box(scene: Scene, number: int) -> bool:
    return not scene.ranks[number].opened


def _formed_one(scene: Scene, number: int) -> bool:
    """Whether others tell that a rank has been in a group, to which all have come."""
    return any(
        number in scene.members(group).values()
        for rank in scene.ranks.values()
        for index, group in enumerate(rank.groups)
        if group.sequence
        or any(o.group == index and o.kind == "join" and o.outcome == "ok" for o in rank.history)
    )


def _circle(scene: Scene, waiters: list[int]) -> Verdict | None:
    circle = find_circle(scene, waiters)
    return deadlock(scene, circle, waiters) if circle else None


def _wrong_message(scene: Scene, ends: list[int]) -> Verdict | None:
    """A message came, but not the one that is waited for."""
    for source in ends:
        for waiter in scene.waiting_for([source]):
            if other_message(scene, waiter, source) is not None:
                return unsent(scene, [waiter], source)
    return None


def is_elsewhere(scene: Scene, number: int) -> bool:
    """Whether it is likely that a rank is on another host: nothing of it is here."""
    rank = scene.ranks[number]
    return scene.job.hosts > 1 and not (rank.opened or rank.pid or rank.problem)


def _elsewhere(scene: Scene, ends: list[int]) -> Verdict | None:
    """Ranks of other hosts, unless the ranks agree that it is one of this host."""
    words = scene.trouble.rank.last_words if scene.trouble is not None else ""
    there = [number for number in ends if is_elsewhere(scene, number)]
    named = [number for number in ends if number in _named(scene, words)]
    if not there or (named and named[0] not in there):
        return None
    return _of(scene, "elsewhere", [n for n in there if n in named] or there, 0, words)


def _named(scene: Scene, words: str) -> list[int | None]:
    """Whom an error says that it was waited for."""
    if scene.trouble is None or (found := _WAITED.search(words)) is None:
        return []
    group = group_of(scene.trouble.rank, scene.trouble.operation)
    return [scene.member(group, int(place)) for place in _RANK.findall(found[1])]


def _unreadable(scene: Scene, ends: list[int]) -> Verdict | None:
    """Ranks whose black box is damaged, of another version, gone, or in memory only."""
    found = [n for n in ends if scene.ranks[n].problem or _without_box(scene, n)]
    if not found:
        return None
    words = scene.trouble.rank.last_words if scene.trouble is not None else ""
    others = ["there is none in the job's directory", *scene.job.problems, *([words] * bool(words))]
    reason = scene.ranks[found[0]].problem or "; ".join(others)
    return _of(scene, "unreadable", found, 0, reason)


def _late(scene: Scene, ends: list[int]) -> Verdict | None:
    """Ranks that went on by themselves after the deadline of those that waited for them."""
    if scene.trouble is None or scene.trouble.outcome != "timeout":
        return None
    found = [number for number in ends if _came_late(scene, number)]
    return _of(scene, "late", found, in_own_code(scene, found[0])) if found else None


def _came_late(scene: Scene, number: int) -> bool:
    rank, end = scene.ranks[number], scene.ends[number]
    later = any(operation.begin > scene.moment for operation in (*rank.history, *rank.open))
    by_itself = end.how in ("well", "exited") or told_of(rank) != ""
    return number not in scene.waits and (later or (by_itself and end.time > scene.moment))


def _busy(scene: Scene, ends: list[int]) -> Verdict | None:
    found = [number for number in ends if scene.under_way(number) is None]
    if not found:
        return None
    return _of(scene, "busy", found, min(in_own_code(scene, number) for number in found))


def _stuck(scene: Scene, ends: list[int], waiters: list[int]) -> Verdict:
    found = [n for n in ends if n in scene.waits and scene.waits[n].operation.waiting_for < 0]
    if found:
        since = min(scene.waits[number].operation.begin for number in found)
        return _of(scene, "stuck", found, since)
    reason = "ranks wait, but their black boxes don't tell for whom"
    return Verdict("unknown", waiting=sides_of(scene, waiters), reason=reason)


def _of(scene: Scene, kind: Kind, numbers: list[int], since: int, reason: str = "") -> Verdict:
    return Verdict(
        kind,
        tuple(numbers),
        since,
        sides_of(scene, numbers),
        sides_of(scene, scene.waiting_for(numbers)),
        end=scene.ends[numbers[0]],
        reason=reason,
    )
