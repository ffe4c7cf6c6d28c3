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
    from collections.abc import Callable, Iterable

    from phalanx.observe.diagnosis.diagnosis import Diagnosis, Kind, Side
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph

__all__ = ["write_sentences"]

_STATES = {
    "running": "its process is running: a long computation or an endless loop",
    "sleeping": "its process is sleeping: it waits for something outside of Phalanx, such as a "
    "lock, a file or another process",
    "disk": "its process is blocked in the kernel, on a disk or a network file system",
}


def write_sentences(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    """Put a diagnosis into sentences, the ranks at fault first; text from the job is escaped."""
    return _DESCRIPTIONS[diagnosis.kind](Phrases(graph, diagnosis))


# The wording of each kind.


def _describe_killed(phrases: Phrases) -> list[str]:
    code = phrases.diagnosis.exit_status.code if phrases.diagnosis.exit_status is not None else None
    name = signal_name(-code) if code is not None else "a signal"
    verb = "was" if len(phrases.diagnosis.ranks) == 1 else "were"
    return [
        f"{phrases.subject} {verb} killed by {name}{_describe_end(phrases)}.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_end(phrases: Phrases) -> str:
    """Describe when and where the rank at fault ended."""
    diagnosis = phrases.diagnosis
    time = phrases.describe_time(
        diagnosis.exit_status.time if diagnosis.exit_status is not None else 0
    )
    return time + (
        phrases.describe_location(diagnosis.ranks[0]) if len(diagnosis.ranks) == 1 else ""
    )


def _describe_exited(phrases: Phrases) -> list[str]:
    code = phrases.diagnosis.exit_status.code if phrases.diagnosis.exit_status is not None else None
    return [
        f"{phrases.subject} ended with exit code {code}{_describe_end(phrases)}.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_failed(phrases: Phrases) -> list[str]:
    error = escape(phrases.diagnosis.reason, 300)
    return [
        f"{phrases.subject} failed{_describe_end(phrases)}: {error}",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_vanished(phrases: Phrases) -> list[str]:
    if len(phrases.diagnosis.ranks) > 1:
        first = (
            f"{phrases.subject} disappeared without recording an exit; they were probably killed."
        )
        return [first, *_describe_last_places(phrases), *phrases.describe_waiting_ranks()]
    return [
        f"{phrases.subject} disappeared without recording an exit{_describe_end(phrases)}: it was "
        "killed by a signal or called os._exit.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_last_places(phrases: Phrases) -> list[str]:
    """Describe the locations of ranks that ended together."""
    places = [
        f"{format_ranks(side.ranks)} {phrases.describe_position(side)}"
        for side in phrases.diagnosis.sides[:4]
    ]
    return [f"At the end: {join_texts(places)}."] if places else []


def _describe_stopped(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    place = phrases.describe_location(diagnosis.ranks[0]) if len(diagnosis.ranks) == 1 else ""
    hint = ""
    if (
        diagnosis.exit_status is not None
        and diagnosis.exit_status.reason == "launcher"
        and phrases.graph.first_failure is None
    ):
        them = phrases.choose_number("it", "them")
        hint = f"The signal that ended the other ranks did not end {them}."
    text = (
        f"{phrases.subject} {phrases.conjugate_be()} stopped by a signal (SIGSTOP or Ctrl-Z){place}"
    )
    time = phrases.describe_time(diagnosis.since)
    last = f"; {_get_possessive(phrases)} last recorded activity was{time}" if time else ""
    return [f"{text}{last}.", *([hint] if hint else []), *phrases.describe_waiting_ranks()]


def _describe_busy(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    been = phrases.choose_tense(
        "has been" if len(diagnosis.ranks) == 1 else "have been", "had been"
    )
    text = (
        f"{phrases.subject} {been} in {_get_possessive(phrases)} own code"
        f"{phrases.describe_duration(diagnosis.since)}"
    )
    if len(diagnosis.ranks) > 1:
        return [f"{text}.", *phrases.describe_waiting_ranks()]
    rank = diagnosis.ranks[0]
    before = phrases.graph.previous_operation(rank)
    if before is not None:
        text += f", after {phrases.describe_operation(rank, before)}"
    return [
        f"{text}{_describe_process_state(phrases, rank)}.",
        *_describe_pauses(phrases, rank),
        *phrases.describe_waiting_ranks(),
    ]


def _get_possessive(phrases: Phrases) -> str:
    return phrases.choose_number("its", "their")


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
        known.append(f"Its longest earlier pause was {format_duration(max(pauses))}.")
    late = [r for r in graph.ranks[rank].reports if since + LONG_WAIT < r.time <= graph.moment]
    reports = [report for report in late if report.step >= 0]
    if reports:
        step, time = reports[-1].step, reports[-1].time
        known.append(
            "It continues without the others: it reported step "
            f"{step}{phrases.describe_time(time)}."
        )
    return known


def _describe_late(phrases: Phrases) -> list[str]:
    been = (
        f"had been in {_get_possessive(phrases)} own code"
        f"{phrases.describe_duration(phrases.diagnosis.since)}"
    )
    it = phrases.choose_number("it", "they")
    return [
        f"{phrases.subject} arrived too late: {it} {been} when the other ranks timed out.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_stuck(phrases: Phrases) -> list[str]:
    side = phrases.diagnosis.sides[0]
    been = phrases.choose_tense(phrases.choose_number("has been", "have been"), "had been")
    since = phrases.describe_duration(phrases.diagnosis.since)
    do = phrases.choose_tense(phrases.choose_number("does", "do"), "did")
    return [
        f"{phrases.subject} {been} in {phrases.describe_call(side)}{since}, and {do} not wait for "
        "any rank.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_branch(phrases: Phrases) -> list[str]:
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


def _describe_message(phrases: Phrases) -> list[str]:
    receiver, sender = phrases.diagnosis.sides
    return [
        f"A message does not match its recv: {format_ranks(sender.ranks)} called "
        f"{phrases.describe_call(sender)}, "
        f"but {format_ranks(receiver.ranks)} called {phrases.describe_call(receiver)}."
    ]


def _describe_finished(phrases: Phrases) -> list[str]:
    diagnosis, rank = phrases.diagnosis, phrases.diagnosis.ranks[0]
    group = next((side.group for side in diagnosis.waiting if side.group is not None), None)
    own = phrases.graph.find_group_record(rank, group) if group is not None else None
    site = f" at {escape(own.left_at.rpartition('/')[2], 60)}" if own and own.left_at else ""
    did = (
        "left the group"
        if own is not None and own.left
        else f"reached the end of {_get_possessive(phrases)} script"
    )
    if not phrases.graph.ranks[rank].opened:
        did += " before it joined any group"
    done = phrases.graph.count_collectives(rank, own) if own is not None else 0
    after = f", after {done} collective{'s' if done != 1 else ''} of that group" if own else ""
    it = phrases.choose_number("it", "they")
    time = phrases.describe_time(diagnosis.since)
    first = f"{phrases.subject} finished early{time}: {it} {did}{site}{after}."
    return [first, *phrases.describe_waiting_ranks()]


def _describe_unsent(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    waiter, source = diagnosis.sides[0], diagnosis.sides[-1]
    other = source.ranks[0]
    one = len(diagnosis.ranks) == 1
    wait = phrases.choose_tense("has waited" if one else "have waited", "waited")
    send = phrases.choose_tense("sends", "sent")
    first = (
        f"{phrases.subject} {wait} for a message that no rank {send}: "
        f"{phrases.describe_call(waiter)},{phrases.describe_duration(diagnosis.since)}."
    )
    status = diagnosis.exit_status
    if status is not None and status.reason in ("completed", "left"):
        place = f"ended{phrases.describe_time(status.time)} without sending it"
    else:
        place = f"{phrases.conjugate_be(source.ranks)} elsewhere{phrases.describe_location(other)}"
    texts = [first, f"{phrases.describe_ranks(source.ranks).capitalize()} {place}."]
    if diagnosis.instead is not None:
        sent = phrases.describe_operation(other, diagnosis.instead)
        texts.append(f"The message that it sent instead has no matching recv: {sent}.")
    return [*texts, *phrases.describe_waiting_ranks()]


def _describe_unreceived(phrases: Phrases) -> list[str]:
    sender, receiver = phrases.diagnosis.sides[0], phrases.diagnosis.sides[-1]
    one = len(sender.ranks) == 1
    verb = phrases.choose_tense("has waited" if one else "have waited", "waited")
    place = phrases.describe_location(receiver.ranks[0])
    return [
        f"{phrases.subject} {verb} for a message to be received: {phrases.describe_call(sender)},"
        f"{phrases.describe_duration(phrases.diagnosis.since)}.",
        f"{phrases.describe_ranks(receiver.ranks).capitalize()} "
        f"{phrases.conjugate_be(receiver.ranks)} elsewhere{place}.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_unawaited(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    group = diagnosis.sides[0].group
    left = group is not None and group.left
    did = f"{'left the group' if left else 'ended'}{phrases.describe_time(diagnosis.since)}"
    return [
        f"{phrases.subject} {did} without waiting for its own message: "
        f"{phrases.describe_call(diagnosis.sides[0])} was still under way.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_missing(phrases: Phrases) -> list[str]:
    diagnosis, graph = phrases.diagnosis, phrases.graph
    if all(side.operation is not None for side in diagnosis.sides):
        return [*_describe_absent_from_new_group(phrases), *phrases.describe_waiting_ranks()]
    joined = phrases.choose_tense(
        phrases.choose_number("has not joined", "have not joined"), "did not join"
    )
    texts = [f"{phrases.subject} {joined} the group."]
    for rank in diagnosis.ranks[:4]:
        record = graph.ranks[rank]
        if record.start is None and not record.pid:
            texts.append(f"There is no trace of rank {rank}: was it started?")
        elif graph.exits[rank].reason == "alive":
            state = _describe_process_state(phrases, rank)
            texts.append(f"Rank {rank} is alive but has not reached init_process_group{state}.")
        else:
            texts.append(f"Rank {rank} had not reached init_process_group when it was stopped.")
    return [*texts, *phrases.describe_waiting_ranks()]


def _describe_absent_from_new_group(phrases: Phrases) -> list[str]:
    called = phrases.choose_tense(
        phrases.choose_number("has not called", "have not called"), "had not called"
    )
    sides = phrases.diagnosis.sides
    places = _describe_sides(phrases, sides)
    return [f"{phrases.subject} {called} `new_group`.", f"Instead, {join_texts(places)}."]


def _describe_sides(phrases: Phrases, sides: Iterable[Side]) -> list[str]:
    return [
        f"{format_ranks(side.ranks)} {phrases.conjugate_be(side.ranks)} "
        f"{phrases.describe_position(side)}"
        for side in sides
    ]


def _describe_order(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    places = _describe_sides(phrases, diagnosis.sides)
    first = f"Ranks use groups in different orders: {join_texts(places)}."
    since = phrases.describe_duration(diagnosis.since)
    each = f"Each side {phrases.choose_tense('has waited', 'waited')} for the other{since}."
    minority = len(diagnosis.ranks) < sum(len(side.ranks) for side in diagnosis.sides)
    last = [f"{phrases.subject} {phrases.conjugate_be()} in the minority."] if minority else []
    return [first, each, *last, *phrases.describe_waiting_ranks()]


def _describe_deadlock(phrases: Phrases) -> list[str]:
    places = [
        f"{format_ranks(side.ranks)} {phrases.describe_position(side)}"
        for side in phrases.diagnosis.sides[:6]
    ]
    verb = phrases.choose_tense("have waited", "waited")
    since = phrases.describe_duration(phrases.diagnosis.since)
    return [
        f"Ranks {verb} for each other{since}: {join_texts(places)}.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_aborted(phrases: Phrases) -> list[str]:
    diagnosis = phrases.diagnosis
    reason = escape(diagnosis.reason, 400)
    if not diagnosis.ranks:
        text = f"The group was aborted{phrases.describe_time(diagnosis.since)}"
        return [f"{text}: {reason}" if reason else f"{text}.", *phrases.describe_waiting_ranks()]
    text = (
        f"{phrases.subject} aborted the group{phrases.describe_time(diagnosis.since)}"
        f"{phrases.describe_location(diagnosis.ranks[0])}"
    )
    return [
        f'{text}: "{reason}"' if reason else f"{text} without giving a reason.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_interrupted(phrases: Phrases) -> list[str]:
    be = "was" if len(phrases.diagnosis.ranks) == 1 else "were"
    place = (
        phrases.describe_location(phrases.diagnosis.ranks[0])
        if len(phrases.diagnosis.ranks) == 1
        else ""
    )
    time = phrases.describe_time(phrases.diagnosis.since)
    pressed = all(phrases.graph.exits[n].reason == "interrupted" for n in phrases.diagnosis.ranks)
    cause = "(Ctrl-C)" if pressed else "by a signal handler that raised an exception"
    return [
        f"{phrases.subject} {be} interrupted {cause}{time}{place}.",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_system(phrases: Phrases) -> list[str]:
    reason = escape(phrases.diagnosis.reason, 400)
    ranks = phrases.describe_ranks(phrases.diagnosis.ranks)
    return [f"The system refused a resource to {ranks}: {reason}"]


def _describe_unreadable(phrases: Phrases) -> list[str]:
    reason = escape(phrases.diagnosis.reason, 300)
    return [
        f"The chain of waits ends at {phrases.describe_ranks(phrases.diagnosis.ranks)}, whose "
        f"flight recorder cannot be read: {reason}",
        *phrases.describe_waiting_ranks(),
    ]


def _describe_other_host(phrases: Phrases) -> list[str]:
    ranks = phrases.diagnosis.ranks
    first = f"The chain of waits ends at {phrases.describe_ranks(ranks)}, on another host."
    reason = escape(phrases.diagnosis.reason, 600)
    return [first, *phrases.describe_waiting_ranks(), *([reason] if reason else [])]


def _describe_launcher(phrases: Phrases) -> list[str]:
    if phrases.graph.job.launcher_lost:
        ranks = phrases.diagnosis.ranks
        return [
            f"The launcher (pid {phrases.graph.job.launcher}) disappeared without recording an "
            "exit: it was killed by a signal that it cannot handle, such as SIGKILL.",
            f"The kernel then killed {format_ranks(ranks)}: no rank had failed before.",
        ]
    return [
        f"The launcher stopped {format_ranks(phrases.diagnosis.ranks)}"
        f"{phrases.describe_time(phrases.diagnosis.since)}: no rank had failed, and none had "
        "waited for long."
    ]


def _describe_running(phrases: Phrases) -> list[str]:
    ranks = phrases.graph.ranks.values()
    if not any(rank.opened for rank in ranks):
        started = "1 process has" if len(ranks) == 1 else f"{len(ranks)} processes have"
        return [f"No rank has joined a group yet; {started} been started."]
    return [
        "Nothing is wrong: no rank has failed, and none has waited for longer than "
        f"{format_duration(LONG_WAIT)}."
    ]


def _describe_ended(_phrases: Phrases) -> list[str]:
    return ["Nothing went wrong: all ranks completed."]


def _describe_unknown(phrases: Phrases) -> list[str]:
    return [
        f"The cause is unknown: {escape(phrases.diagnosis.reason, 400)}.",
        *phrases.describe_waiting_ranks(),
    ]


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
    "other_host": _describe_other_host,
    "unreadable": _describe_unreadable,
    "launcher": _describe_launcher,
    "running": _describe_running,
    "ended": _describe_ended,
    "unknown": _describe_unknown,
}
