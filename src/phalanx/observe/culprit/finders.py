"""Who is to blame for a hang or a death: a list of finders, asked one after another.

Causes come before what follows from them. So the finders look at the operation that failed first,
if any did; at ranks that ended by themselves; and then at who waits for whom (`holdups`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from phalanx.observe.culprit.endings import last_sign, told_in, told_of
from phalanx.observe.culprit.holdups import held_up, lost, stopped
from phalanx.observe.culprit.messages import unfit_message
from phalanx.observe.culprit.verdict import Side, Verdict, sides_of
from phalanx.observe.culprit.waits import BY_ITSELF, Scene, group_of
from phalanx.observe.last_words import SESSION_ENDED

if TYPE_CHECKING:
    from phalanx.observe.model import Group, Job, Operation

__all__ = ["find", "find_in"]

_KNOWN = ("peer_lost", "left", "timeout", "mismatch", "ring", "aborted", "interrupted")
_ABORTER = re.compile(r"\baborted by rank (\d{1,5})\b")
_REFUSED = re.compile(r"\brank (\d{1,5}) could not get memory|system error on rank (\d{1,5})\b")


def find(job: Job) -> Verdict:
    """Find out what holds up a job, or what ended it. Never raises, whatever the job says."""
    return find_in(Scene(job))


def find_in(scene: Scene) -> Verdict:
    """`find` in a scene that is made already."""
    for finder in _FINDERS:
        if (verdict := finder(scene)) is not None:
            return verdict
    return Verdict("unknown", reason="nothing in its black boxes tells")


# Nothing to go by.


def _no_trace(scene: Scene) -> Verdict | None:
    ranks = scene.job.ranks
    if any(rank.opened or rank.start is not None for rank in ranks):
        return None
    problems = [f"rank {rank.rank}: {rank.problem}" for rank in ranks if rank.problem]
    problems += scene.job.problems
    return Verdict("unknown", reason="; ".join(problems) or "no rank has left a black box")


# The first operation that failed, and why.


def _disagreement(scene: Scene) -> Verdict | None:
    trouble = scene.trouble
    if trouble is None or trouble.outcome != "mismatch":
        return None
    group = group_of(trouble.rank, trouble.operation)
    there = [number for number in sorted(scene.troubles) if _broken_with(scene, number, group)]
    messages = [number for number in there if scene.troubles[number].operation.is_message]
    collectives = [number for number in there if number not in messages]
    if len({_signature(scene.troubles[n].operation) for n in collectives}) < 2:
        for number in messages:
            if (verdict := _unfit(scene, number)) is not None:
                return verdict
    sides = _disagreeing(scene, _furthest(scene, collectives) or there)
    return Verdict("branch", _out_of_step(sides), scene.moment, sides, reason=_words(scene))


def _broken_with(scene: Scene, number: int, group: Group | None) -> bool:
    """Whether a rank's trouble is that ranks of this group disagree."""
    trouble = scene.troubles[number]
    own = group_of(trouble.rank, trouble.operation)
    same = own is not None and group is not None and own.identity == group.identity
    return trouble.outcome == "mismatch" and (same or trouble is scene.trouble)


def _unfit(scene: Scene, number: int) -> Verdict | None:
    """A message that doesn't fit the recv of this rank."""
    recv = scene.troubles[number].operation
    found = unfit_message(scene, number, recv) if recv.kind == "recv" else None
    if found is None:
        return None
    sender, sent = found
    sides = (_side(scene, [number]), Side((sender,), sent, group_of(scene.ranks[sender], sent)))
    return Verdict("message", tuple(sorted((number, sender))), scene.moment, sides, instead=sent)


def _furthest(scene: Scene, numbers: list[int]) -> list[int]:
    """Those in the collective in which ranks disagree: others were told in the one before it."""
    sequences = {number: scene.troubles[number].operation.sequence for number in numbers}
    return [n for n, sequence in sequences.items() if sequence == max(sequences.values())]


def _signature(operation: Operation) -> tuple[object, ...]:
    """What must be the same on all ranks of a collective."""
    return (
        operation.sequence,
        operation.kind,
        operation.dtype,
        operation.count,
        operation.peer,
        operation.op,
    )


def _disagreeing(scene: Scene, numbers: list[int]) -> tuple[Side, ...]:
    """The sides of a mismatch, the smallest first; ranks that called alike stand together."""
    places: dict[tuple[object, str], list[int]] = {}
    alike: Counter[object] = Counter()
    for number in numbers:
        operation = scene.troubles[number].operation
        places.setdefault((_signature(operation), operation.site), []).append(number)
        alike[_signature(operation)] += 1
    ordered = sorted(places, key=lambda place: (alike[place[0]], places[place]))
    return tuple(_side(scene, places[place]) for place in ordered)


def _side(scene: Scene, ranks: list[int]) -> Side:
    trouble = scene.troubles[ranks[0]]
    return Side(tuple(ranks), trouble.operation, group_of(trouble.rank, trouble.operation))


def _out_of_step(sides: tuple[Side, ...]) -> tuple[int, ...]:
    """The ranks that called what fewest did; all of them where none are fewer."""
    callers: dict[object, list[int]] = {}
    for side in sides:
        signature = None if side.operation is None else _signature(side.operation)
        callers.setdefault(signature, []).extend(side.ranks)
    few = min(len(ranks) for ranks in callers.values())
    fewest = [ranks for ranks in callers.values() if len(ranks) == few]
    named = fewest[0] if len(fewest) == 1 else [n for ranks in callers.values() for n in ranks]
    return tuple(sorted(named))


def _abort(scene: Scene) -> Verdict | None:
    trouble = scene.trouble
    if trouble is None or trouble.outcome != "aborted":
        return None
    group = group_of(trouble.rank, trouble.operation)
    aborter = _aborter(scene, group)
    if aborter is None:
        waiting = sides_of(scene, sorted(scene.waits))
        return Verdict("aborted", (), scene.moment, waiting=waiting, reason=_words(scene))
    why, rank = _why(scene, aborter, group), scene.ranks[aborter]
    if scene.ends[aborter].by_itself and not told_of(rank) and why.startswith(BY_ITSELF):
        return lost(scene, [aborter])
    return _aborted(scene, aborter, why)


def _aborted(scene: Scene, aborter: int, why: str) -> Verdict:
    return Verdict(
        "aborted",
        (aborter,),
        scene.moment,
        sides_of(scene, [aborter]),
        sides_of(scene, sorted(set(scene.waits) - {aborter})),
        reason=why,
    )


def _why(scene: Scene, number: int, group: Group | None) -> str:
    """Why a rank aborted a group, or gave up what it did there; empty if it says nothing."""
    own = scene.in_group(number, group) if group is not None else None
    return own.why if own is not None else ""


def _aborter(scene: Scene, group: Group | None) -> int | None:
    """Who aborted a group: whoever says why, or has left it and was not told."""
    if group is None:
        return None
    members = sorted(number for number in scene.members(group).values() if number in scene.ranks)
    known = {number: own for number in members if (own := scene.in_group(number, group))}
    said = [number for number, own in known.items() if own.why]
    left = [number for number, own in known.items() if own.left and number not in scene.troubles]
    if said or left:
        return (said or left)[0]
    found = _ABORTER.search(_words(scene))
    return scene.member(group, int(found[1])) if found else None


def _unformed(scene: Scene) -> Verdict | None:
    """A rank could not form a group, not for want of others: a wrong world size, for example."""
    trouble = scene.trouble
    if trouble is None or trouble.operation.kind != "join" or trouble.outcome != "system":
        return None
    # What it failed for may be one that is gone, and that hosted the store.
    gone = [number for number in scene.ranks if scene.gone(number) and scene.ends[number].by_itself]
    if gone:
        return lost(scene, gone)
    number = trouble.rank.rank
    reason = trouble.rank.last_words or "it could not form the group"
    sides, waiting = sides_of(scene, [number]), sides_of(scene, scene.waiting_for([number]))
    end = scene.ends[number]
    return Verdict("failed", (number,), scene.moment, sides, waiting, end, reason=reason)


def _failed_there(scene: Scene, number: int, group: Group | None) -> bool:
    """Whether a rank's session ended by an exception of its own, and so its part in a group."""
    why = _why(scene, number, group)
    own = not told_of(scene.ranks[number]) and not told_in(why.removeprefix(SESSION_ENDED))
    return why.startswith(SESSION_ENDED) and own


def _refusal(scene: Scene) -> Verdict | None:
    """The system refused memory, or something else, to a rank."""
    trouble = scene.trouble
    if trouble is None or trouble.outcome in _KNOWN:
        return None
    words = _words(scene)
    found = _REFUSED.search(words)
    group = group_of(trouble.rank, trouble.operation)
    refused = scene.member(group, int(found[1] or found[2])) if found else None
    ranks = () if refused is None else (refused,)
    sides = sides_of(scene, ranks or [trouble.rank.rank])
    return Verdict("system", ranks, scene.moment, sides, reason=words or trouble.outcome)


def _loss(scene: Scene) -> Verdict | None:
    """A rank was lost to its peers, or had left them."""
    trouble = scene.trouble
    if trouble is None or trouble.outcome not in ("peer_lost", "left"):
        return None
    group = group_of(trouble.rank, trouble.operation)
    members = [number for number in scene.members(group).values() if number in scene.ranks]
    failed = [n for n in members if _failed_there(scene, n, group)]
    if failed:
        first = min(failed, key=lambda n: (scene.ends[n].time or math.inf, n))
        if scene.ends[first].by_itself:
            return lost(scene, [first])
        # Somebody caught the exception, and the process lives on.
        return _aborted(scene, first, _why(scene, first, group))
    untold = [n for n in members if n not in scene.troubles and not told_of(scene.ranks[n])]
    gone = [n for n in untold if scene.ends[n].by_itself or scene.ends[n].how in ("well", "left")]
    if group is not None and trouble.outcome == "left":
        gone = [number for number in untold if scene.has_left(number, group)] or gone
    return lost(scene, gone) if gone else None


# No operation failed, or none that tells.


def _death(scene: Scene) -> Verdict | None:
    """A rank ended by itself, and nothing else is known to be wrong."""
    if scene.trouble is not None or scene.recovered:
        return None
    return _dead(scene)


def _dead(scene: Scene) -> Verdict | None:
    gone = [number for number, end in scene.ends.items() if end.by_itself]
    own = [n for n in gone if n not in scene.troubles and not told_of(scene.ranks[n])]
    return lost(scene, own) if own else None


def _ring(scene: Scene) -> Verdict | None:
    """Ranks waited for each other, and one of them has found that out."""
    if scene.trouble is None or scene.trouble.outcome != "ring":
        return None
    groups = [group for rank in scene.ranks.values() for group in rank.groups]
    reason = next((group.why for group in groups if group.why), _words(scene))
    sides = sides_of(scene, sorted(scene.waits))
    return Verdict("order", tuple(sorted(scene.waits)), scene.moment, sides, reason=reason)


def _interruption(scene: Scene) -> Verdict | None:
    ranks = tuple(number for number, end in scene.ends.items() if end.how == "interrupted")
    if scene.trouble is not None and scene.trouble.outcome == "interrupted":
        ranks = ranks or (scene.trouble.rank.rank,)
    if not ranks:
        return None
    return Verdict("interrupted", ranks, scene.moment, sides_of(scene, ranks), reason=_words(scene))


def _stopped_somewhere(scene: Scene) -> Verdict | None:
    return stopped(scene, sorted(scene.ranks))


def _failed_operation(scene: Scene) -> Verdict | None:
    """Something failed, but its cause can't be found."""
    if scene.trouble is None:
        return None
    waiting = sides_of(scene, [scene.trouble.rank.rank])
    reason = _words(scene) or f"an operation ended with {scene.trouble.outcome}"
    return Verdict("unknown", (), scene.moment, waiting=waiting, reason=reason)


# Nothing is wrong, or nobody knows.


def _launcher(scene: Scene) -> Verdict | None:
    ranks = tuple(number for number, end in scene.ends.items() if end.how == "launcher")
    return Verdict("launcher", ranks, scene.moment) if ranks else None


def _told(scene: Scene) -> Verdict | None:
    """All that is left are ranks that were told of something, nobody knows of what."""
    gone = [number for number, end in scene.ends.items() if end.by_itself]
    return lost(scene, gone) if gone else None


def _good(scene: Scene) -> Verdict | None:
    hows = {end.how for end in scene.ends.values()}
    if hows <= {"well", "left"} and not scene.runs:
        return Verdict("ended", since=max((last_sign(rank) for rank in scene.job.ranks), default=0))
    return Verdict("running") if scene.runs else None


_FINDERS = (
    _no_trace,
    _disagreement,
    _abort,
    _unformed,
    _refusal,
    _loss,
    _death,
    held_up,
    _ring,
    _stopped_somewhere,
    _interruption,
    _dead,
    _failed_operation,
    _launcher,
    _told,
    _good,
)


def _words(scene: Scene) -> str:
    """The exception of the rank whose operation failed first; else of any that was told."""
    first = [scene.trouble.rank] if scene.trouble is not None else []
    told = [rank for rank in scene.ranks.values() if told_of(rank)]
    return next((rank.last_words for rank in (*first, *told) if rank.last_words), "")
