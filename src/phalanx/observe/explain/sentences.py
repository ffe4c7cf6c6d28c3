"""A verdict in plain sentences: who and why, since when and where, and who waits because of it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from phalanx.observe.culprit.endings import signal_name
from phalanx.observe.culprit.holdups import LONG, in_own_code
from phalanx.observe.escape import escape
from phalanx.observe.explain.phrases import Words
from phalanx.observe.explain.words import joined, named, span

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.observe.culprit.verdict import Kind, Verdict
    from phalanx.observe.culprit.waits import Scene

__all__ = ["sentences"]

_STATES = {
    "running": "its process is running: a long computation, or an endless loop",
    "sleeping": "its process sleeps: it waits for something outside of Phalanx (a lock, a file, "
    "another process, a sleep)",
    "disk": "its process waits for the kernel, on a disk or a network file system",
}


def sentences(scene: Scene, verdict: Verdict) -> list[str]:
    """The verdict in sentences, the culprit's first. Whatever came from the job is escaped."""
    return _WORDING[verdict.kind](Words(scene, verdict))


# One wording for each kind.


def _killed(words: Words) -> list[str]:
    code = words.verdict.end.code if words.verdict.end is not None else None
    name = signal_name(-code) if code is not None else "a signal"
    what = "was" if len(words.verdict.ranks) == 1 else "were"
    return [f"{words.who} {what} killed by {name}{_end(words)}.", *words.waiting()]


def _end(words: Words) -> str:
    """When and where the culprit ended."""
    verdict = words.verdict
    time = words.at(verdict.end.time if verdict.end is not None else 0)
    return time + (words.place(verdict.ranks[0]) if len(verdict.ranks) == 1 else "")


def _exited(words: Words) -> list[str]:
    code = words.verdict.end.code if words.verdict.end is not None else None
    return [f"{words.who} ended with exit code {code}{_end(words)}.", *words.waiting()]


def _failed(words: Words) -> list[str]:
    error = escape(words.verdict.reason, 300)
    return [f"{words.who} failed{_end(words)}: {error}", *words.waiting()]


def _vanished(words: Words) -> list[str]:
    if len(words.verdict.ranks) > 1:
        first = f"{words.who} are gone, and none has said why: it seems that they were killed."
        return [first, *_last_places(words), *words.waiting()]
    text = f"{words.who} is gone without a word: killed by a signal, or ended with os._exit"
    return [f"{text}{_end(words)}.", *words.waiting()]


def _last_places(words: Words) -> list[str]:
    """Where ranks were at the end that all had at once."""
    places = [f"{named(side.ranks)} {words.inside(side)}" for side in words.verdict.sides[:4]]
    return [f"At the end: {joined(places)}."] if places else []


def _stopped(words: Words) -> list[str]:
    verdict = words.verdict
    place = words.place(verdict.ranks[0]) if len(verdict.ranks) == 1 else ""
    by = "by a signal (SIGSTOP, or Ctrl-Z)"
    if verdict.end is not None and verdict.end.how == "launcher" and words.scene.trouble is None:
        by += ", it seems, for the signal that ended the others did not end it"
    text = f"{words.who} {words.be()} stopped {by}{place}"
    sign = words.at(verdict.since)
    return [text + (f"; its last sign of life came{sign}." if sign else "."), *words.waiting()]


def _busy(words: Words) -> list[str]:
    verdict = words.verdict
    been = words.now("has been" if len(verdict.ranks) == 1 else "have been", "had been")
    text = f"{words.who} {been} in code of {_their(words)} own{words.since(verdict.since)}"
    if len(verdict.ranks) > 1:
        return [f"{text}.", *words.waiting()]
    rank = verdict.ranks[0]
    before = words.scene.before(rank)
    if before is not None:
        text += f", after {words.operation(rank, before)}"
    return [f"{text}{_state(words, rank)}.", *_habit(words, rank), *words.waiting()]


def _their(words: Words) -> str:
    return "its" if len(words.verdict.ranks) == 1 else "their"


def _state(words: Words, rank: int) -> str:
    """What the process of a rank does that is in code of its own."""
    process = words.scene.ranks[rank].process
    state = _STATES.get(process.state) if process is not None and words.live else None
    return f"; {state}" if state else ""


def _habit(words: Words, rank: int) -> list[str]:
    """What speaks for or against a hang: how long such pauses were before, and reports in this."""
    scene, known = words.scene, []
    since = in_own_code(scene, rank)
    past = sorted(scene.ranks[rank].history, key=lambda operation: operation.begin)
    pauses = [b.begin - a.end for a, b in pairwise(past) if a.end <= b.begin]
    if pauses and max(pauses) >= LONG:
        known.append(f"Its longest such pause before was {span(max(pauses))}.")
    late = [r for r in scene.ranks[rank].reports if since + LONG < r.time <= scene.moment]
    reports = [report for report in late if report.step >= 0]
    if reports:
        step, time = reports[-1].step, reports[-1].time
        known.append(f"It gets on without the others: it reported step {step}{words.at(time)}.")
    return known


def _late(words: Words) -> list[str]:
    been = f"had been in code of {_their(words)} own{words.since(words.verdict.since)}"
    it = "it" if len(words.verdict.ranks) == 1 else "they"
    return [f"{words.who} came too late: {it} {been} when the others gave up.", *words.waiting()]


def _stuck(words: Words) -> list[str]:
    side = words.verdict.sides[0]
    been = words.now("has been", "had been")
    inside = f"{been} inside of {words.called(side)}{words.since(words.verdict.since)}"
    return [
        f"{words.who} {inside}, and {words.now('waits', 'waited')} for nobody.",
        *words.waiting(),
    ]


def _branch(words: Words) -> list[str]:
    sides, culprits = words.verdict.sides, words.verdict.ranks
    own = [side for side in sides if set(side.ranks) <= set(culprits)]
    rest = [f"{named(side.ranks)} called {words.called(side)}" for side in sides if side not in own]
    when, reason = words.at(words.verdict.since), escape(words.verdict.reason, 400)
    if rest and len(own) == 1:
        it = "it" if len(culprits) == 1 else "they"
        called = f"{it} called {words.called(own[0])}, but {joined(rest)}"
        return [f"{words.who} took another branch than the others{when}: {called}."]
    calls = [f"{named(side.ranks)} called {words.called(side)}" for side in own] + rest
    first = f"Ranks took different branches{when}: {joined(calls)}."
    return [first, *([reason] if len(calls) == 1 and reason else [])]


def _message(words: Words) -> list[str]:
    receiver, sender = words.verdict.sides
    return [
        f"A message doesn't fit: {named(sender.ranks)} called {words.called(sender)}, "
        f"but {named(receiver.ranks)} called {words.called(receiver)}."
    ]


def _finished(words: Words) -> list[str]:
    verdict, rank = words.verdict, words.verdict.ranks[0]
    group = next((side.group for side in verdict.waiting if side.group is not None), None)
    own = words.scene.in_group(rank, group) if group is not None else None
    where = f" at {escape(own.left_at.rpartition('/')[2], 60)}" if own and own.left_at else ""
    did = "left the group" if own is not None and own.left else "came to the end of its script"
    done = words.scene.reached(rank, own) if own is not None else 0
    after = f", after {done} collective{'s' if done != 1 else ''} of that group" if own else ""
    first = f"{words.who} finished early{words.at(verdict.since)}: it {did}{where}{after}."
    return [first, *words.waiting()]


def _unsent(words: Words) -> list[str]:
    verdict = words.verdict
    waiter, source = verdict.sides[0], verdict.sides[-1]
    other = source.ranks[0]
    one = len(verdict.ranks) == 1
    first = (
        f"{words.who} {words.now('waits' if one else 'wait', 'waited')} for a message that "
        f"{words.now('nobody sends', 'nobody sent')}: {words.called(waiter)},"
        f"{words.since(verdict.since)}."
    )
    end = verdict.end
    if end is not None and end.how in ("well", "left"):
        place = f"came to its end{words.at(end.time)} without sending it"
    else:
        place = f"{words.now('is', 'was')} elsewhere{words.place(other)}"
    texts = [first, f"{words.rank(source.ranks).capitalize()} {place}."]
    if verdict.instead is not None:
        sent = words.operation(other, verdict.instead)
        texts.append(f"What it sent instead, and nobody asked for: {sent}.")
    return [*texts, *words.waiting()]


def _unreceived(words: Words) -> list[str]:
    sender, receiver = words.verdict.sides[0], words.verdict.sides[-1]
    waits = words.now("waits" if len(sender.ranks) == 1 else "wait", "waited")
    place = words.place(receiver.ranks[0])
    return [
        f"{words.who} {waits} for somebody to take a message: {words.called(sender)},"
        f"{words.since(words.verdict.since)}.",
        f"{words.rank(receiver.ranks).capitalize()} doesn't: it {words.now('is', 'was')} "
        f"elsewhere{place}.",
        *words.waiting(),
    ]


def _missing(words: Words) -> list[str]:
    verdict, scene = words.verdict, words.scene
    texts = [f"{words.who} {words.now('has not come', 'did not come')} to form the group."]
    for rank in verdict.ranks[:4]:
        record = scene.ranks[rank]
        if record.start is None and not record.pid:
            texts.append(f"There is no trace of rank {rank}: was it started?")
        elif scene.ends[rank].how == "alive":
            state = _state(words, rank)
            texts.append(f"Rank {rank} runs, but has not come to init_process_group{state}.")
        else:
            texts.append(f"Rank {rank} had not come to init_process_group when it was stopped.")
    return [*texts, *words.waiting()]


def _order(words: Words) -> list[str]:
    verdict = words.verdict
    places = [
        f"{named(side.ranks)} {words.be(side.ranks)} {words.inside(side)}" for side in verdict.sides
    ]
    first = f"Ranks use groups in different orders: {joined(places)}."
    since = words.since(verdict.since)
    each = f"Each side {words.now('waits', 'waited')} for the other{since}."
    minority = len(verdict.ranks) < sum(len(side.ranks) for side in verdict.sides)
    who = [f"{words.who} {words.be()} in the minority."] if minority else []
    return [first, each, *who, *words.waiting()]


def _deadlock(words: Words) -> list[str]:
    places = [f"{named(side.ranks)} {words.inside(side)}" for side in words.verdict.sides[:6]]
    wait = words.now("wait", "waited")
    since = words.since(words.verdict.since)
    return [f"Ranks {wait} for each other{since}: {joined(places)}.", *words.waiting()]


def _aborted(words: Words) -> list[str]:
    verdict = words.verdict
    reason = escape(verdict.reason, 400)
    if not verdict.ranks:
        text = f"The group was aborted{words.at(verdict.since)}"
        return [f"{text}: {reason}" if reason else f"{text}.", *words.waiting()]
    text = f"{words.who} aborted the group{words.at(verdict.since)}{words.place(verdict.ranks[0])}"
    return [f'{text}: "{reason}"' if reason else f"{text}, and gave no reason.", *words.waiting()]


def _interrupted(words: Words) -> list[str]:
    be = "was" if len(words.verdict.ranks) == 1 else "were"
    place = words.place(words.verdict.ranks[0]) if len(words.verdict.ranks) == 1 else ""
    when = words.at(words.verdict.since)
    return [f"{words.who} {be} interrupted (Ctrl-C){when}{place}.", *words.waiting()]


def _system(words: Words) -> list[str]:
    reason = escape(words.verdict.reason, 400)
    return [f"The system refused something to {words.rank(words.verdict.ranks)}: {reason}"]


def _unreadable(words: Words) -> list[str]:
    reason = escape(words.verdict.reason, 300)
    return [
        f"The way ends at {words.rank(words.verdict.ranks)}, whose black box can't be read: "
        f"{reason}",
        *words.waiting(),
    ]


def _elsewhere(words: Words) -> list[str]:
    ranks = words.verdict.ranks
    first = f"The way ends at {words.rank(ranks)}, on another host."
    reason = escape(words.verdict.reason, 600)
    return [first, *words.waiting(), *([reason] if reason else [])]


def _launcher(words: Words) -> list[str]:
    return [
        f"The launcher stopped {named(words.verdict.ranks)}{words.at(words.verdict.since)}: no "
        "rank had failed, and none had waited for long."
    ]


def _running(words: Words) -> list[str]:
    ranks = words.scene.ranks.values()
    if not any(rank.opened for rank in ranks):
        return [f"No rank has come to form a group yet; {len(ranks)} processes have been started."]
    return [f"Nothing is wrong: no rank has failed, and none has waited for {span(LONG)}."]


def _ended(_words: Words) -> list[str]:
    return ["Nothing went wrong: all ranks came to their end."]


def _unknown(words: Words) -> list[str]:
    return [f"Can't tell: {escape(words.verdict.reason, 400)}.", *words.waiting()]


_WORDING: dict[Kind, Callable[[Words], list[str]]] = {
    "killed": _killed,
    "exited": _exited,
    "failed": _failed,
    "vanished": _vanished,
    "stopped": _stopped,
    "busy": _busy,
    "late": _late,
    "stuck": _stuck,
    "branch": _branch,
    "message": _message,
    "finished": _finished,
    "unsent": _unsent,
    "unreceived": _unreceived,
    "missing": _missing,
    "order": _order,
    "deadlock": _deadlock,
    "aborted": _aborted,
    "interrupted": _interrupted,
    "system": _system,
    "elsewhere": _elsewhere,
    "unreadable": _unreadable,
    "launcher": _launcher,
    "running": _running,
    "ended": _ended,
    "unknown": _unknown,
}
