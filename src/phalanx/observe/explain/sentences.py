"""A diagnosis in plain sentences: ranks at fault, cause, time, location, and waiting ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.blocked_ranks import LONG_WAIT, get_own_code_start
from phalanx.observe.escape import escape
from phalanx.observe.explain.formatting import format_duration, format_ranks, join_texts
from phalanx.observe.explain.pending_calls import describe_blocking_calls
from phalanx.observe.explain.phrases import Phrases
from phalanx.system.signals import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.observe.diagnosis.diagnosis import Diagnosis, Kind
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph

__all__ = ["write_sentences"]

_STATES = {
    "running": "its process is running: a long computation, or an endless loop",
    "sleeping": "its process sleeps: it waits for something outside of Phalanx (a lock, a file, "
    "another process, a sleep)",
    "disk": "its process waits for the kernel, on a disk or a network file system",
}


def write_sentences(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    """Put a diagnosis into sentences, the ranks at fault first; text from the job is escaped."""
    return _DESCRIPTIONS[diagnosis.kind](Phrases(graph, diagnosis))


# The wording of each kind.


def _describe_killed(phrases: Phrases) -> list[str]:
    code = phrases.diagnosis.exit_status.code if phrases.diagnosis.exit_status is not None else None
    name = signal_name(-code) if code is not None else "a signal"
    what = "was" if len(phrases.diagnosis.ranks) == 1 else "were"
    return [
        f"{phrases.subject} {what} killed by {name}{_describe_end(phrases)}.",
        *phrases.waiting(),
    ]


def _describe_end(phrases: Phrases) -> str:
    """Describe when and where the rank at fault ended."""
    diagnosis = phrases.diagnosis
    time = phrases.at(diagnosis.exit_status.time if diagnosis.exit_status is not None else 0)
    return time + (phrases.place(diagnosis.ranks[0]) if len(diagnosis.ranks) == 1 else "")


def _describe_exited(phrases: Phrases) -> list[str]:
    code = phrases.diagnosis.exit_status.code if phrases.diagnosis.exit_status is not None else None
    return [
        f"{phrases.subject} ended with exit code {code}{_describe_end(phrases)}.",
        *phrases.waiting(),
    ]


def _describe_failed(phrases: Phrases) -> list[str]:
    error = escape(phrases.diagnosis.reason, 300)
    return [f"{phrases.subject} failed{_describe_end(phrases)}: {error}", *phrases.waiting()]


def _describe_vanished(phrases: Phrases) -> list[str]:
    if len(phrases.diagnosis.ranks) > 1:
        first = (
            f"{phrases.subject} are gone, and none has said why: it seems that they were killed."
        )
        return [first, *_describe_last_places(phrases), *phrases.waiting()]
    text = f"{phrases.subject} is gone without a word: killed by a signal, or ended with os._exit"
    return [f"{text}{_describe_end(phrases)}.", *phrases.waiting()]


def _describe_last_places(phrases: Phrases) -> list[str]:
    """Describe the locations of ranks that ended together."""
    places = [
        f"{format_ranks(side.ranks)} {phrases.inside(side)}" for side in phrases.diagnosis.sides[:4]
    ]
    return [f"At the end: {join_texts(places)}."] if places else []


def _describe_stopped(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    place = phrases.place(diagnosis.ranks[0]) if len(diagnosis.ranks) == 1 else ""
    by = "by a signal (SIGSTOP, or Ctrl-Z)"
    if (
        diagnosis.exit_status is not None
        and diagnosis.exit_status.reason == "launcher"
        and phrases.graph.first_failure is None
    ):
        by += ", it seems, for the signal that ended the others did not end it"
    text = f"{phrases.subject} {phrases.be()} stopped {by}{place}"
    sign = phrases.at(diagnosis.since)
    sign = f"; {_get_possessive(phrases)} last sign of life came{sign}" if sign else ""
    return [f"{text}{sign}.", *phrases.waiting()]


def _describe_busy(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    been = phrases.now("has been" if len(diagnosis.ranks) == 1 else "have been", "had been")
    text = (
        f"{phrases.subject} {been} in code of {_get_possessive(phrases)} own"
        f"{phrases.since(diagnosis.since)}"
    )
    if len(diagnosis.ranks) > 1:
        return [f"{text}.", *phrases.waiting()]
    rank = diagnosis.ranks[0]
    before = phrases.graph.previous_operation(rank)
    if before is not None:
        text += f", after {phrases.operation(rank, before)}"
    return [
        f"{text}{_describe_process_state(phrases, rank)}.",
        *_describe_pauses(phrases, rank),
        *phrases.waiting(),
    ]


def _get_possessive(phrases: Phrases) -> str:
    return phrases.form("its", "their")


def _describe_process_state(phrases: Phrases, rank: int) -> str:
    """Describe the process state of a rank that is in its own code; empty if not live."""
    process = phrases.graph.ranks[rank].process
    state = _STATES.get(process.state) if process is not None and phrases.is_live else None
    return f"; {state}" if state else ""


def _describe_pauses(phrases: Phrases, rank: int) -> list[str]:
    """Return evidence for or against a hang: earlier pauses, and reports during this one."""
    graph, known = phrases.graph, []
    since = get_own_code_start(graph, rank)
    past = sorted(graph.ranks[rank].history, key=lambda operation: operation.begin)
    pauses = [b.begin - a.end for a, b in pairwise(past) if a.end <= b.begin]
    if pauses and max(pauses) >= LONG_WAIT:
        known.append(f"Its longest such pause before was {format_duration(max(pauses))}.")
    late = [r for r in graph.ranks[rank].reports if since + LONG_WAIT < r.time <= graph.moment]
    reports = [report for report in late if report.step >= 0]
    if reports:
        step, time = reports[-1].step, reports[-1].time
        known.append(f"It gets on without the others: it reported step {step}{phrases.at(time)}.")
    return known


def _describe_late(phrases: Phrases) -> list[str]:
    been = (
        f"had been in code of {_get_possessive(phrases)} own"
        f"{phrases.since(phrases.diagnosis.since)}"
    )
    it = phrases.form("it", "they")
    return [
        f"{phrases.subject} came too late: {it} {been} when the others gave up.",
        *phrases.waiting(),
    ]


def _describe_stuck(phrases: Phrases) -> list[str]:
    side = phrases.diagnosis.sides[0]
    been = phrases.now(phrases.form("has been", "have been"), "had been")
    inside = f"{been} inside of {phrases.called(side)}{phrases.since(phrases.diagnosis.since)}"
    return [
        f"{phrases.subject} {inside}, and "
        f"{phrases.now(phrases.form('waits', 'wait'), 'waited')} for nobody.",
        *phrases.waiting(),
    ]


def _describe_branch(phrases: Phrases) -> list[str]:
    sides, at_fault = phrases.diagnosis.sides, phrases.diagnosis.ranks
    own = [side for side in sides if set(side.ranks) <= set(at_fault)]
    rest = [
        f"{format_ranks(side.ranks)} called {phrases.called(side)}"
        for side in sides
        if side not in own
    ]
    when, reason = phrases.at(phrases.diagnosis.since), escape(phrases.diagnosis.reason, 400)
    if rest and len(own) == 1:
        it = "it" if len(at_fault) == 1 else "they"
        called = f"{it} called {phrases.called(own[0])}, but {join_texts(rest)}"
        return [f"{phrases.subject} took another branch than the others{when}: {called}."]
    calls = [f"{format_ranks(side.ranks)} called {phrases.called(side)}" for side in own] + rest
    first = f"Ranks took different branches{when}: {join_texts(calls)}."
    return [first, *([reason] if len(calls) == 1 and reason else [])]


def _describe_message(phrases: Phrases) -> list[str]:
    receiver, sender = phrases.diagnosis.sides
    return [
        f"A message doesn't fit: {format_ranks(sender.ranks)} called {phrases.called(sender)}, "
        f"but {format_ranks(receiver.ranks)} called {phrases.called(receiver)}."
    ]


def _describe_finished(phrases: Phrases) -> list[str]:
    diagnosis, rank = phrases.diagnosis, phrases.diagnosis.ranks[0]
    group = next((side.group for side in diagnosis.waiting if side.group is not None), None)
    own = phrases.graph.find_group_record(rank, group) if group is not None else None
    where = f" at {escape(own.left_at.rpartition('/')[2], 60)}" if own and own.left_at else ""
    did = (
        "left the group"
        if own is not None and own.left
        else f"came to the end of {_get_possessive(phrases)} script"
    )
    if not phrases.graph.ranks[rank].opened:
        did += " before it joined any group"
    done = phrases.graph.count_collectives(rank, own) if own is not None else 0
    after = f", after {done} collective{'s' if done != 1 else ''} of that group" if own else ""
    it = phrases.form("it", "they")
    first = (
        f"{phrases.subject} finished early{phrases.at(diagnosis.since)}: {it} {did}{where}{after}."
    )
    return [first, *phrases.waiting()]


def _describe_unsent(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    waiter, source = diagnosis.sides[0], diagnosis.sides[-1]
    other = source.ranks[0]
    one = len(diagnosis.ranks) == 1
    first = (
        f"{phrases.subject} {phrases.now('waits' if one else 'wait', 'waited')} for a message that "
        f"{phrases.now('nobody sends', 'nobody sent')}: {phrases.called(waiter)},"
        f"{phrases.since(diagnosis.since)}."
    )
    status = diagnosis.exit_status
    if status is not None and status.reason in ("well", "left"):
        place = f"came to its end{phrases.at(status.time)} without sending it"
    else:
        place = f"{phrases.be(source.ranks)} elsewhere{phrases.place(other)}"
    texts = [first, f"{phrases.rank(source.ranks).capitalize()} {place}."]
    if diagnosis.instead is not None:
        sent = phrases.operation(other, diagnosis.instead)
        texts.append(f"What it sent instead, and nobody asked for: {sent}.")
    return [*texts, *phrases.waiting()]


def _describe_unreceived(phrases: Phrases) -> list[str]:
    sender, receiver = phrases.diagnosis.sides[0], phrases.diagnosis.sides[-1]
    waits = phrases.now("waits" if len(sender.ranks) == 1 else "wait", "waited")
    place = phrases.place(receiver.ranks[0])
    return [
        f"{phrases.subject} {waits} for somebody to take a message: {phrases.called(sender)},"
        f"{phrases.since(phrases.diagnosis.since)}.",
        f"{phrases.rank(receiver.ranks).capitalize()} {phrases.be(receiver.ranks)} "
        f"elsewhere{place}.",
        *phrases.waiting(),
    ]


def _describe_unawaited(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    group = diagnosis.sides[0].group
    left = group is not None and group.left
    did = f"{'left the group' if left else 'ended'}{phrases.at(diagnosis.since)}"
    return [
        f"{phrases.subject} {did} without waiting for a message of its own: "
        f"{phrases.called(diagnosis.sides[0])}, was still under way.",
        *phrases.waiting(),
    ]


def _describe_missing(phrases: Phrases) -> list[str]:
    diagnosis, graph = phrases.diagnosis, phrases.graph
    if all(side.operation is not None for side in diagnosis.sides):
        return [*_describe_absent_from_new_group(phrases), *phrases.waiting()]
    come = phrases.now(phrases.form("has not come", "have not come"), "did not come")
    texts = [f"{phrases.subject} {come} to form the group."]
    for rank in diagnosis.ranks[:4]:
        record = graph.ranks[rank]
        if record.start is None and not record.pid:
            texts.append(f"There is no trace of rank {rank}: was it started?")
        elif graph.exits[rank].reason == "alive":
            state = _describe_process_state(phrases, rank)
            texts.append(f"Rank {rank} runs, but has not come to init_process_group{state}.")
        else:
            texts.append(f"Rank {rank} had not come to init_process_group when it was stopped.")
    return [*texts, *phrases.waiting()]


def _describe_absent_from_new_group(phrases: Phrases) -> list[str]:
    called = phrases.now(phrases.form("has not called", "have not called"), "had not called")
    sides = phrases.diagnosis.sides
    places = [
        f"{format_ranks(side.ranks)} {phrases.be(side.ranks)} {phrases.inside(side)}"
        for side in sides
    ]
    return [f"{phrases.subject} {called} `new_group`.", f"Instead, {join_texts(places)}."]


def _describe_order(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    places = [
        f"{format_ranks(side.ranks)} {phrases.be(side.ranks)} {phrases.inside(side)}"
        for side in diagnosis.sides
    ]
    first = f"Ranks use groups in different orders: {join_texts(places)}."
    since = phrases.since(diagnosis.since)
    each = f"Each side {phrases.now('waits', 'waited')} for the other{since}."
    minority = len(diagnosis.ranks) < sum(len(side.ranks) for side in diagnosis.sides)
    who = [f"{phrases.subject} {phrases.be()} in the minority."] if minority else []
    return [first, each, *who, *phrases.waiting()]


def _describe_deadlock(phrases: Phrases) -> list[str]:
    places = [
        f"{format_ranks(side.ranks)} {phrases.inside(side)}" for side in phrases.diagnosis.sides[:6]
    ]
    wait = phrases.now("wait", "waited")
    since = phrases.since(phrases.diagnosis.since)
    return [f"Ranks {wait} for each other{since}: {join_texts(places)}.", *phrases.waiting()]


def _describe_aborted(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    reason = escape(diagnosis.reason, 400)
    if not diagnosis.ranks:
        text = f"The group was aborted{phrases.at(diagnosis.since)}"
        return [f"{text}: {reason}" if reason else f"{text}.", *phrases.waiting()]
    text = (
        f"{phrases.subject} aborted the group{phrases.at(diagnosis.since)}"
        f"{phrases.place(diagnosis.ranks[0])}"
    )
    return [f'{text}: "{reason}"' if reason else f"{text}, and gave no reason.", *phrases.waiting()]


def _describe_interrupted(phrases: Phrases) -> list[str]:
    be = "was" if len(phrases.diagnosis.ranks) == 1 else "were"
    place = phrases.place(phrases.diagnosis.ranks[0]) if len(phrases.diagnosis.ranks) == 1 else ""
    when = phrases.at(phrases.diagnosis.since)
    pressed = all(phrases.graph.exits[n].reason == "interrupted" for n in phrases.diagnosis.ranks)
    how = "(Ctrl-C)" if pressed else "by a signal handler that raised an exception"
    return [f"{phrases.subject} {be} interrupted {how}{when}{place}.", *phrases.waiting()]


def _describe_system(phrases: Phrases) -> list[str]:
    reason = escape(phrases.diagnosis.reason, 400)
    return [f"The system refused something to {phrases.rank(phrases.diagnosis.ranks)}: {reason}"]


def _describe_unreadable(phrases: Phrases) -> list[str]:
    reason = escape(phrases.diagnosis.reason, 300)
    return [
        f"The way ends at {phrases.rank(phrases.diagnosis.ranks)}, whose flight recorder can't be read: "
        f"{reason}",
        *phrases.waiting(),
    ]


def _describe_elsewhere(phrases: Phrases) -> list[str]:
    ranks = phrases.diagnosis.ranks
    first = f"The way ends at {phrases.rank(ranks)}, on another host."
    reason = escape(phrases.diagnosis.reason, 600)
    return [first, *phrases.waiting(), *([reason] if reason else [])]


def _describe_launcher(phrases: Phrases) -> list[str]:
    if phrases.graph.job.launcher_lost:
        ranks = phrases.diagnosis.ranks
        return [
            f"The launcher (pid {phrases.graph.job.launcher}) is gone without having noted an end: "
            "it was killed by a signal that it can't handle, as SIGKILL.",
            f"The kernel ended {format_ranks(ranks)} with it: no rank had failed before.",
        ]
    return [
        f"The launcher stopped {format_ranks(phrases.diagnosis.ranks)}"
        f"{phrases.at(phrases.diagnosis.since)}: no rank had failed, and none had waited for long."
    ]


def _describe_running(phrases: Phrases) -> list[str]:
    ranks = phrases.graph.ranks.values()
    if not any(rank.opened for rank in ranks):
        started = "1 process has" if len(ranks) == 1 else f"{len(ranks)} processes have"
        return [f"No rank has come to form a group yet; {started} been started."]
    return [
        "Nothing is wrong: no rank has failed, and none has waited for "
        f"{format_duration(LONG_WAIT)}."
    ]


def _describe_ended(_phrases: Phrases) -> list[str]:
    return ["Nothing went wrong: all ranks came to their end."]


def _describe_unknown(phrases: Phrases) -> list[str]:
    return [f"Can't tell: {escape(phrases.diagnosis.reason, 400)}.", *phrases.waiting()]


_DESCRIPTIONS: dict[Kind, Callable[[Phrases], list[str]]] = {
    "killed": _describe_killed,
    "exited": _describe_exited,
    "failed": _describe_failed,
    "vanished": _describe_vanished,
    "stopped": _describe_stopped,
    "busy": _describe_busy,
    "late": _describe_late,
    "stuck": _describe_stuck,
    "branch": _describe_branch,
    "message": _describe_message,
    "finished": _describe_finished,
    "unsent": _describe_unsent,
    "unreceived": _describe_unreceived,
    "unawaited": _describe_unawaited,
    "unanswered": lambda phrases: describe_blocking_calls(phrases.graph),
    "missing": _describe_missing,
    "order": _describe_order,
    "deadlock": _describe_deadlock,
    "aborted": _describe_aborted,
    "interrupted": _describe_interrupted,
    "system": _describe_system,
    "elsewhere": _describe_elsewhere,
    "unreadable": _describe_unreadable,
    "launcher": _describe_launcher,
    "running": _describe_running,
    "ended": _describe_ended,
    "unknown": _describe_unknown,
}
