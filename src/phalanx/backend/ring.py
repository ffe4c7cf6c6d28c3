"""Finds ranks that wait for each other in different groups, before any deadline ends that.

Two groups that ranks use in opposite order are a ring of waits: rank 0 waits in group A for rank 1,
which waits in group B for rank 0. In each group by itself nothing is wrong, no fingerprints are
ever compared, and nobody moves again. Black boxes show it: a rank that has waited for a second
follows the waits from box to box, and where they lead back to itself, twice with the very same
operations, it breaks its groups on that ring. Who is thrown out of one passes that on to the others
who wait for it: so every rank of the ring hears of it, also where no group has them all.

Only what is certain counts as a link: the main thread of a rank stands in a collective, or waits
without a limit for an asynchronous one while no thread of a group is in anything else (see
`waiting`); the rank that it waits for has not come to that one; and no other thread of the waiting
rank takes part in operations. A rank that is merely stopped, or busy in a signal handler, still
says whom it waited for when it stopped; but who is waited for has come by then. For all else there
are deadlines, and `phalanx explain`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.backend import witness
from phalanx.backend.call_site import brief
from phalanx.observe.escape import escape
from phalanx.observe.members import ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx import _native

Box = dict[str, Any]

_HISTORY = 64
_LONGEST = 16
"""Rings of more ranks than this are left to the deadline."""
_MAIN = 0
_GROUP = 1
_OTHER = 2


@dataclass(frozen=True)
class _Link:
    """A rank of the job that waits in an operation of a group for another rank of the job."""

    rank: int
    number: int
    sequence: int
    identity: int
    peer: int
    peer_in_group: int
    words: str


_suspected: tuple[_Link, ...] = ()


def look(groups: Iterable[_native.Group]) -> bool:
    """Look for a ring through this rank; break the groups on one that was there the last time.

    Args:
        groups: All groups of this process that it hasn't left.

    Returns:
        Whether there is a ring that has to be looked at once more. False in other threads than
        the main one, whose waits alone are looked at.
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
    """Break the groups in which ranks wait for this one, if a ring has thrown it out of `broken`.

    This rank raises now and won't come. Who finds a ring breaks its own groups alone; the other
    ranks would hear of it by the death of this one.

    Args:
        broken: The group in which an operation of this rank has failed.
        groups: All groups of this process that it hasn't left.
    """
    if threading.current_thread() is not threading.main_thread() or broken.closed:
        return
    status = broken.broken()
    if status is None or status.code != "ring":
        return
    own = broken.black_box(broken.rank, _HISTORY)
    if own is None or _has_others(own):
        return
    # What has been told to all hosts has words; on one host they stand with who found the ring.
    why = getattr(status, "words", "") or witness.reason(broken, status.reporter)
    boxes: dict[int, Box | None] = {}
    for group in groups:
        peer = None if group.broken() else _in_vain(own, group, boxes)
        if peer is not None:
            group.abort_ring(peer, why)


def _in_vain(own: Box, group: _native.Group, boxes: dict[int, Box | None]) -> int | None:
    """A rank of the group that waits there for an operation to which this rank hasn't come."""
    note = next((each for each in own["groups"] if each["identity"] == group.identity), None)
    for peer in range(note["size"] if note else 0):
        if peer == group.rank:
            continue
        pid = group.pid(peer)
        if boxes.get(pid) is None:  # that of another host's can't be read
            boxes[pid] = group.black_box(peer, _HISTORY)
        box = boxes[pid]
        wait = _wait(box) if box else None
        if not box or not wait or box["groups"][wait["group"]]["identity"] != group.identity:
            continue
        if _is_missing(own, group.identity, wait["sequence"]):
            return peer
    return None


def _ring(groups: dict[int, _native.Group]) -> tuple[_Link, ...]:
    own = next(iter(groups.values()), None)
    box = first = own and own.black_box(own.rank, _HISTORY)
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
    """Whether the rank of this box has not begun a collective of a group, nor does so by itself.

    A thread of the group that is in an earlier one may have more to do afterwards.
    """
    indices = [i for i, note in enumerate(box["groups"]) if note["identity"] == identity]
    if not indices or box["groups"][indices[-1]]["sequence"] >= sequence:
        return False
    return not any(each["group"] == indices[-1] for each in _in_threads(box))


def _has_others(box: Box) -> bool:
    """Whether other threads than the main one and those of groups take part in operations."""
    return any(each["thread"] == _OTHER for each in (*box["done"], *box["open"]))


def _in_threads(box: Box) -> list[Box]:
    """What threads of groups are in."""
    return [each for each in box["open"] if each["thread"] == _GROUP]


def _wait(box: Box) -> Box | None:
    """The collective that a rank's main thread waits in; None if it may come out by itself.

    Or waits for, while a group's thread does it. Whatever else such threads do may end that wait: a
    callback may call anything.
    """
    waits = [each for each in box["open"] if each["thread"] == _MAIN and each["group"] >= 0]
    awaited = [each for each in _in_threads(box) if each["number"] == box["main_waits"]]
    if awaited and not waits and awaited == _in_threads(box):
        waits = awaited
    if len(waits) != 1 or waits[0]["kind"] in ("send", "recv", "join") or _has_others(box):
        return None
    wait: Box = waits[0]
    return wait if wait["group"] >= 0 else None


def _link(box: Box) -> _Link | None:
    """The wait of a rank; None if there is none that counts."""
    wait = _wait(box)
    if wait is None:
        return None
    note = box["groups"][wait["group"]]
    peer = wait["waiting_for"]
    members = ranks_of(note["members"])
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
    """The box of the rank that is waited for, if this rank shares a group with it."""
    if link.identity in groups:
        return groups[link.identity].black_box(link.peer_in_group, _HISTORY)
    for group in groups.values():
        own = group.black_box(group.rank, 0)
        notes = own["groups"] if own else []
        members = next(
            (ranks_of(note["members"]) for note in notes if note["identity"] == group.identity), ()
        )
        if link.peer in members:
            return group.black_box(members.index(link.peer), _HISTORY)
    return None


def _break(ring: tuple[_Link, ...], groups: dict[int, _native.Group]) -> None:
    why = "ranks use groups in different orders: " + ", ".join(link.words for link in ring)
    for link in ring:
        if link.identity in groups:
            groups[link.identity].abort_ring(link.peer_in_group, why)
