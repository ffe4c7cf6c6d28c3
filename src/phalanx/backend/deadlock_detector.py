"""Detection of deadlocks across groups, before any deadline ends them.

If ranks use two groups in opposite order, their waits form a ring: rank 0 waits in group A for rank
1, which waits in group B for rank 0. Each group by itself looks correct, no fingerprints are
compared, and no rank makes progress. The flight recorders show the deadlock. A rank that has waited for
a second follows the waits from box to box. If they lead back to itself, twice with exactly the same
operations, it breaks its groups on that ring. A rank whose group is broken so passes the failure on
to the ranks that wait for it in its other groups. Thus every rank of the ring learns of the
deadlock, even if no group contains them all.

Only certain waits count as links. The main thread of a rank is in a collective, or waits without a
timeout for an asynchronous one while no thread of a group is in another operation (see `waiting`).
The rank that it waits for has not entered that collective. No other thread of the waiting rank
takes part in operations. The box of a rank that is merely stopped, or busy in a signal handler,
still shows its wait, but the rank that it waited for has arrived by then. All other cases are left
to deadlines and `phalanx explain`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.backend import peer_state
from phalanx.backend.call_site import brief
from phalanx.observe.escape import escape
from phalanx.observe.rank_ranges import parse_rank_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx import _native

Box = dict[str, Any]

_HISTORY = 64
_LONGEST = 16
"""The maximum number of ranks in a ring; longer rings are left to the deadline."""
_MAIN = 0
_GROUP = 1
_OTHER = 2


class _Link(NamedTuple):
    """A wait of a rank of the job, in an operation of a group, for another rank of the job."""

    rank: int
    number: int
    sequence: int
    identity: int
    peer: int
    peer_in_group: int
    words: str


_suspected: tuple[_Link, ...] = ()


def look(groups: Iterable[_native.Group]) -> bool:
    """Search for a ring through this rank; break its groups if the previous call found the same.

    Args:
        groups: All groups that this process has not left.

    Returns:
        Whether there is a ring that another call must confirm. Always False outside the main
        thread, since only its waits are examined.
    """
    global _suspected  # noqa: PLW0603
    if threading.current_thread() is not threading.main_thread():
        return False
    of_identity = {group.identity: group for group in groups}
    ring = _ring(of_identity)
    confirmed = bool(ring) and ring == _suspected
    _suspected = ring
    if confirmed:
        _break(ring, of_identity)
    return bool(ring) and not confirmed


def pass_on(broken: _native.Group, groups: Iterable[_native.Group]) -> None:
    """Break the groups in which ranks wait for this one, if a ring caused `broken` to be broken.

    This rank is about to raise, so it will not enter the operations that these ranks wait in. The
    rank that finds a ring breaks only its own groups. Without this call, the other ranks would
    learn of the failure only by the death of this rank.

    Args:
        broken: The group in which an operation of this rank has failed.
        groups: All groups that this process has not left.
    """
    if threading.current_thread() is not threading.main_thread() or broken.closed:
        return
    status = broken.failure()
    if status is None or status.code != "deadlock":
        return
    own = broken.flight_recorder(broken.rank, _HISTORY)
    if own is None or _has_others(own):
        return
    # In a group of several hosts the status has the reason; on one host, the finder's box has it.
    why = getattr(status, "words", "") or peer_state.reason(broken, status.reporter)
    boxes: dict[int, Box | None] = {}
    for group in groups:
        peer = None if group.failure() else _in_vain(own, group, boxes)
        if peer is not None:
            group.abort_deadlock(peer, why)


def _in_vain(own: Box, group: _native.Group, boxes: dict[int, Box | None]) -> int | None:
    """Return a rank of the group that waits there in an operation that this rank has not entered.

    Returns None if there is no such rank.
    """
    note = next((each for each in own["groups"] if each["identity"] == group.identity), None)
    for peer in range(note["size"] if note else 0):
        if peer == group.rank:
            continue
        pid = group.pid(peer)
        if boxes.get(pid) is None:  # boxes of other hosts cannot be read
            boxes[pid] = group.flight_recorder(peer, _HISTORY)
        box = boxes[pid]
        wait = _wait(box) if box else None
        if not box or not wait or box["groups"][wait["group"]]["identity"] != group.identity:
            continue
        if _is_missing(own, group.identity, wait["sequence"]):
            return peer
    return None


def _ring(groups: dict[int, _native.Group]) -> tuple[_Link, ...]:
    own = next(iter(groups.values()), None)
    box = first = own and own.flight_recorder(own.rank, _HISTORY)
    links: list[_Link] = []
    while box and len(links) < _LONGEST:
        link = _link(box)
        if link is None:
            return ()
        links.append(link)
        closes = link.peer == links[0].rank
        box = first if closes else _box_of(link, groups)
        if not box or not _is_missing(box, link.identity, link.sequence):
            return ()
        if closes:
            several = len({each.identity for each in links}) > 1
            return tuple(links) if several else ()
    return ()


def _is_missing(box: Box, identity: int, sequence: int) -> bool:
    """Return whether the rank of this box has not begun a collective and cannot begin it by itself.

    If a thread of the group is in an earlier collective, it may have more queued.
    """
    indices = [i for i, note in enumerate(box["groups"]) if note["identity"] == identity]
    if not indices or box["groups"][indices[-1]]["sequence"] >= sequence:
        return False
    return not any(each["group"] == indices[-1] for each in _in_threads(box))


def _has_others(box: Box) -> bool:
    """Return whether threads besides the main one and those of groups take part in operations."""
    return any(each["thread"] == _OTHER for each in (*box["done"], *box["open"]))


def _in_threads(box: Box) -> list[Box]:
    """Return the operations that threads of groups are in."""
    return [each for each in box["open"] if each["thread"] == _GROUP]


def _wait(box: Box) -> Box | None:
    """Return the collective that a rank's main thread waits in; None if it may return by itself.

    The main thread may also wait for a collective that a group's thread is in. If such threads are
    in other operations too, those may end the wait, since a callback may call anything.
    """
    waits = [each for each in box["open"] if each["thread"] == _MAIN and each["group"] >= 0]
    awaited = [each for each in _in_threads(box) if each["number"] == box["main_thread_wait"]]
    if awaited and not waits and awaited == _in_threads(box):
        waits = awaited
    if len(waits) != 1 or waits[0]["kind"] in ("send", "recv", "join") or _has_others(box):
        return None
    wait: Box = waits[0]
    return wait if wait["group"] >= 0 else None


def _link(box: Box) -> _Link | None:
    """Return the wait of a rank; None if there is none that counts."""
    wait = _wait(box)
    if wait is None:
        return None
    note = box["groups"][wait["group"]]
    peer = wait["waiting_for"]
    members = parse_rank_ranges(note["members"])
    if not 0 <= peer < len(members):
        return None
    site = f" at {escape(brief(wait['site']))}" if wait["site"] else ""
    words = (
        f"rank {box['rank']} waits in {wait['kind']} #{wait['sequence']} of group "
        f"'{escape(note['name'])}'{site} for rank {members[peer]}"
    )
    identity = note["identity"]
    return _Link(
        box["rank"], wait["number"], wait["sequence"], identity, members[peer], peer, words
    )


def _box_of(link: _Link, groups: dict[int, _native.Group]) -> Box | None:
    """Return the box of the rank that is waited for; None if this rank shares no group with it."""
    if link.identity in groups:
        return groups[link.identity].flight_recorder(link.peer_in_group, _HISTORY)
    for group in groups.values():
        own = group.flight_recorder(group.rank, 0)
        notes = own["groups"] if own else []
        members = next(
            (
                parse_rank_ranges(note["members"])
                for note in notes
                if note["identity"] == group.identity
            ),
            (),
        )
        if link.peer in members:
            return group.flight_recorder(members.index(link.peer), _HISTORY)
    return None


def _break(ring: tuple[_Link, ...], groups: dict[int, _native.Group]) -> None:
    why = "ranks use groups in different orders: " + ", ".join(link.words for link in ring)
    for link in ring:
        if link.identity in groups:
            groups[link.identity].abort_deadlock(link.peer_in_group, why)
