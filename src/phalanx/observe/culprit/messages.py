"""Messages that don't meet: a recv without its send, and what was sent instead."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from phalanx.observe.culprit.verdict import Verdict, sides_of
from phalanx.observe.culprit.waits import group_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from phalanx.observe.culprit.waits import Scene
    from phalanx.observe.model import Operation

__all__ = ["messages_between", "other_message", "unfit_message", "unsent"]


def unsent(scene: Scene, waiters: Sequence[int], source: int) -> Verdict:
    """Ranks wait for messages that `source` doesn't send."""
    others = [number for number in scene.waiting_for(waiters) if number != source]
    return Verdict(
        "unsent",
        tuple(waiters),
        min(scene.waits[waiter].operation.begin for waiter in waiters),
        (*sides_of(scene, waiters), *sides_of(scene, [source])),
        sides_of(scene, others),
        end=scene.ends.get(source),
        instead=other_message(scene, waiters[0], source),
    )


def other_message(scene: Scene, waiter: int, source: int) -> Operation | None:
    """The newest message from `source` for which `waiter` never asked, while it waits for one."""
    wait = scene.waits.get(waiter)
    if wait is None or wait.operation.kind != "recv" or wait.peers != (source,):
        return None
    identity = _identity(scene, waiter, wait.operation)
    sent = [*messages_between(scene, "send", source, waiter, identity)]
    asked = Counter(o.sequence for o in messages_between(scene, "recv", waiter, source, identity))
    if not _whole(scene, waiter) or not _whole(scene, source):
        sent = [operation for operation in sent if operation.sequence not in asked]
    given = Counter(operation.sequence for operation in sent)
    for operation in reversed(sent):
        tag = operation.sequence
        if given[tag] > asked[tag] and tag != wait.operation.sequence:
            return operation
    return None


def unfit_message(scene: Scene, number: int, recv: Operation) -> tuple[int, Operation] | None:
    """The message that doesn't fit a recv of this rank, and who sent it."""
    group = group_of(scene.ranks[number], recv)
    source = scene.member(group, recv.peer)
    sources = scene.members(group).values() if recv.peer < 0 else [source]
    for sender in sources:
        if sender is None or sender not in scene.ranks:
            continue
        sent = messages_between(scene, "send", sender, number, _identity(scene, number, recv))
        for operation in reversed([*sent]):
            fits = (operation.dtype, operation.count) == (recv.dtype, recv.count)
            if operation.sequence == recv.sequence and not fits:
                return sender, operation
    return None


def messages_between(
    scene: Scene, kind: str, rank: int, other: int, identity: int | None
) -> Iterator[Operation]:
    """Messages between two ranks in a group, oldest first."""
    record = scene.ranks.get(rank)
    for operation in chain(record.history, record.open) if record is not None else ():
        if operation.kind != kind or _identity(scene, rank, operation) != identity:
            continue
        group = group_of(scene.ranks[rank], operation)
        # A recv from any rank may have taken it.
        if scene.member(group, operation.peer) == other or operation.peer < 0:
            yield operation


def _identity(scene: Scene, rank: int, operation: Operation) -> int | None:
    group = group_of(scene.ranks[rank], operation)
    return None if group is None else group.identity


def _whole(scene: Scene, number: int) -> bool:
    """Whether all operations of a rank are known."""
    rank = scene.ranks[number]
    return rank.operations <= len(rank.history) + len(rank.open)
