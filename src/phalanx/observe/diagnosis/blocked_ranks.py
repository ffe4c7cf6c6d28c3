"""Waiting ranks, and the ranks that ultimately block them.

The rules follow each waiting rank to the ranks that it waits for, and so on. A path ends at a rank
that does not wait, which blocks all the others. A path without an end is a cycle: its ranks wait
for each other (`deadlocks`).
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.deadlocks import diagnose_deadlock, find_cycle
from phalanx.observe.diagnosis.diagnosis import (
    CHECK_BRANCHES,
    Diagnosis,
    Rule,
    build_diagnosis,
    build_sides,
    suggest_stack_dump,
)
from phalanx.observe.diagnosis.exit_reasons import get_last_record_time, get_phalanx_error
from phalanx.observe.diagnosis.formatting import format_duration, format_ranks, join_texts
from phalanx.observe.diagnosis.lost_ranks import diagnose_lost_ranks
from phalanx.observe.diagnosis.messages import diagnose_unsent_message, find_other_message
from phalanx.observe.diagnosis.wait_for_graph import LONG_WAIT
from phalanx.observe.escape import escape
from phalanx.observe.model import get_group

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.observe.diagnosis.diagnosis import Phrases
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph

__all__ = [
    "BusyRank",
    "FinishedRank",
    "LateRank",
    "MissingRank",
    "RankOnOtherHost",
    "StoppedRank",
    "StuckRank",
    "UnreadableRecorder",
    "check_blocked_ranks",
    "check_stopped_ranks",
]

_WAITED = re.compile(r"\bwaited for ((?:rank \d{1,5}(?: \([^)]*\))?(?:, )?)+)")

_RANK = re.compile(r"rank (\d{1,5})")

_PROCESS_STATES = {
    "running": "its process is running: a long computation or an endless loop",
    "sleeping": "its process is sleeping: it waits for something outside of Phalanx, such as a "
    "lock, a file or another process",
    "disk": "its process is blocked in the kernel, on a disk or a network file system",
}

_DEADLINE = (
    "If it needs that long, give operations more time: "
    "`phalanx.init(timeout=SECONDS)` or `init_process_group(..., timeout=timedelta(...))`."
)

_NEW_GROUP = (
    "If the group has only some of the ranks: every rank of the job must call `new_group`, in the "
    "same order."
)

_STORE_HOST = (
    "Rank 0 may be running: it hosts the store, and leaves no trace until all other ranks have "
    "connected to it."
)


def check_blocked_ranks(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis of the ranks that block others, if a wait is long or was cut short."""
    waiters = [number for number in graph.waits if _needs_explanation(graph, number)]
    if not waiters:
        return None
    reached = _find_reachable(graph, waiters)
    blocking = sorted(number for number in reached if not _is_blocked(graph, number))
    found = (
        _check_lost(graph, blocking)
        or StoppedRank.detect(graph, blocking)
        or MissingRank.detect(graph, blocking)
        or _check_cycle(graph, sorted(reached - {*blocking}))
        or _check_wrong_message(graph, blocking)
        or RankOnOtherHost.detect(graph, blocking)
    )
    if found:
        return found
    blocking = [number for number in blocking if not graph.is_on_other_host(number)]
    return (
        UnreadableRecorder.detect(graph, blocking)
        or LateRank.detect(graph, blocking)
        or BusyRank.detect(graph, blocking)
        or _diagnose_stuck(graph, blocking, waiters)
    )


def check_stopped_ranks(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis of all ranks that are stopped by a signal, if any."""
    return StoppedRank.detect(graph, sorted(graph.ranks))


def _needs_explanation(graph: WaitForGraph, number: int) -> bool:
    """Return whether a wait needs an explanation: a failure cut it short, or it is long."""
    if graph.is_gone(number):
        return False
    operation = graph.waits[number].operation
    outcome = "ok" if graph.first_failure is None else graph.first_failure.outcome
    cut = operation.outcome != "ok" and outcome not in ("ok", "interrupted")
    return cut or graph.moment - operation.begin >= LONG_WAIT


def _is_blocked(graph: WaitForGraph, number: int) -> bool:
    """Return whether other ranks block this rank."""
    wait = graph.waits.get(number)
    still = graph.is_gone(number) or graph.is_stopped(number)
    return wait is not None and bool(wait.peers) and not still


def _find_reachable(graph: WaitForGraph, start: Iterable[int]) -> set[int]:
    found: set[int] = set()
    todo = [*start]
    while todo:
        number = todo.pop()
        if number in found or number not in graph.ranks:
            continue
        found.add(number)
        if _is_blocked(graph, number):
            todo += graph.waits[number].peers
    return found


# Ranks that do not wait, from the most to the least certain cause.


def _check_lost(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
    lost_ranks = [number for number in blocking if graph.is_gone(number)]
    return diagnose_lost_ranks(graph, lost_ranks) if lost_ranks else None


class StoppedRank(Rule):
    """A rank is stopped by a signal, and could be continued."""

    kind = "stopped"

    @staticmethod
    def detect(graph: WaitForGraph, numbers: Iterable[int]) -> Diagnosis | None:
        """Return a diagnosis of the given ranks that are stopped by a signal, if any."""
        found = [number for number in numbers if graph.is_stopped(number)]
        if not found:
            return None
        since = max(get_last_record_time(graph.ranks[number]) for number in found)
        return build_diagnosis(graph, "stopped", found, since)

    def describe(self, phrases: Phrases) -> list[str]:
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
            f"{phrases.subject} {phrases.conjugate_be()} stopped by a signal (SIGSTOP or Ctrl-Z)"
            f"{place}"
        )
        time = phrases.describe_time(diagnosis.since)
        last = f"; {_get_possessive(phrases)} last recorded activity was{time}" if time else ""
        return [f"{text}{last}.", *([hint] if hint else []), *phrases.describe_waiting_ranks()]

    def suggest_fixes(self, phrases: Phrases) -> list[str]:
        graph = phrases.graph
        pids = " ".join(
            str(graph.ranks[n].pid) for n in phrases.diagnosis.ranks[:16] if graph.ranks[n].pid
        )
        alive = graph.job.running and pids
        return [
            *([f"Continue it: `kill -CONT {pids}`."] if alive else []),
            "Find the cause of the stop: Ctrl-Z in its terminal, a debugger, a scheduler that "
            "suspends jobs, or `kill -STOP`.",
        ]


class MissingRank(Rule):
    """A rank did not join a new group."""

    kind = "missing"

    @staticmethod
    def detect(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
        """Return a diagnosis of ranks that never joined a group that others wait to form."""
        joining = [wait for wait in graph.waits.values() if graph.is_joining(wait.rank)]
        awaited = {number for wait in joining for number in wait.peers}
        found = [n for n in blocking if n in awaited and graph.never_joined(n)]
        begun = [wait.operation.begin for wait in joining]
        return build_diagnosis(graph, "missing", found, min(begun)) if found else None

    def describe(self, phrases: Phrases) -> list[str]:
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

    def suggest_fixes(self, phrases: Phrases) -> list[str]:
        graph, diagnosis = phrases.graph, phrases.diagnosis
        if all(side.operation is not None for side in diagnosis.sides):
            return [_NEW_GROUP, CHECK_BRANCHES]
        verb = "was" if len(diagnosis.ranks) == 1 else "were"
        output = "its output" if len(diagnosis.ranks) == 1 else "their output"
        alive = [
            n for n in diagnosis.ranks if graph.exits[n].reason == "alive" and graph.ranks[n].pid
        ]
        is_host_absent = (
            0 in diagnosis.ranks and len(diagnosis.ranks) > 1 and graph.exits[0].reason == "absent"
        )
        return [
            *([suggest_stack_dump(graph, alive)] if alive else []),
            f"Check that {format_ranks(diagnosis.ranks)} {verb} started, and look at {output}: "
            "every process needs its own RANK and the same WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT. `phalanx run` sets them.",
            *([_STORE_HOST] if is_host_absent else []),
            _NEW_GROUP,
        ]


def _describe_absent_from_new_group(phrases: Phrases) -> list[str]:
    called = phrases.choose_tense(
        phrases.choose_number("has not called", "have not called"), "had not called"
    )
    sides = phrases.diagnosis.sides
    places = phrases.describe_sides(sides)
    return [f"{phrases.subject} {called} `new_group`.", f"Instead, {join_texts(places)}."]


class FinishedRank(Rule):
    """A rank ended or left while others needed it."""

    kind = "finished"
    fixes = (
        "The other ranks call more operations than it does: uneven data (`drop_last=True`, or a "
        "DistributedSampler, gives every rank as many batches), or an early `return`, `break` or "
        "`sys.exit` on one rank.",
        "`phalanx trace` shows where the ranks diverge.",
    )

    def describe(self, phrases: Phrases) -> list[str]:
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

    def suggest_fixes(self, phrases: Phrases) -> list[str]:
        early = not any(phrases.graph.ranks[number].opened for number in phrases.diagnosis.ranks)
        return MissingRank().suggest_fixes(phrases) if early else list(self.fixes)


def _check_cycle(graph: WaitForGraph, waiters: list[int]) -> Diagnosis | None:
    cycle = find_cycle(graph, waiters)
    return diagnose_deadlock(graph, cycle, waiters) if cycle else None


def _check_wrong_message(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
    """Return a diagnosis if a rank was sent a message other than the one that it waits for."""
    for source in blocking:
        for waiter in graph.find_waiters([source]):
            if find_other_message(graph, waiter, source) is not None:
                return diagnose_unsent_message(graph, [waiter], source)
    return None


class RankOnOtherHost(Rule):
    """A rank that left no trace is on another host, as is its flight recorder."""

    kind = "other_host"
    fixes = (
        "Run `phalanx explain` on the host of these ranks: their flight recorders are in a "
        "directory there.",
    )

    @staticmethod
    def detect(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
        """Return a diagnosis of ranks of other hosts, unless an error names a rank of this host."""
        exception = graph.first_failure.rank.exception if graph.first_failure is not None else ""
        there = [number for number in blocking if graph.is_on_other_host(number)]
        named = [number for number in blocking if number in _find_named_ranks(graph, exception)]
        if not there or (named and named[0] not in there):
            return None
        return build_diagnosis(
            graph, "other_host", [n for n in there if n in named] or there, 0, exception
        )

    def describe(self, phrases: Phrases) -> list[str]:
        ranks = phrases.diagnosis.ranks
        first = f"The chain of waits ends at {phrases.describe_ranks(ranks)}, on another host."
        reason = escape(phrases.diagnosis.reason, 600)
        return [first, *phrases.describe_waiting_ranks(), *([reason] if reason else [])]


def _find_named_ranks(graph: WaitForGraph, exception: str) -> list[int | None]:
    """Return the ranks that a timed-out operation waited for, according to its error."""
    if graph.first_failure is None or (found := _WAITED.search(exception)) is None:
        return []
    group = get_group(graph.first_failure.rank, graph.first_failure.operation)
    return [graph.get_global_rank(group, int(place)) for place in _RANK.findall(found[1])]


class UnreadableRecorder(Rule):
    """A rank is absent, and its flight recorder is unreadable."""

    kind = "unreadable"
    fixes = (
        "Look at that rank's output. If it runs another version of Phalanx, install the same "
        "version everywhere.",
    )

    @staticmethod
    def detect(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
        """Return a diagnosis of ranks without a readable flight recorder.

        The recorder may be damaged, of another version, removed or in memory only.
        """
        found = [n for n in blocking if graph.ranks[n].problem or not graph.ranks[n].opened]
        if not found:
            return None
        exception = graph.first_failure.rank.exception if graph.first_failure is not None else ""
        others = [
            "there is none in the job's directory",
            *graph.job.problems,
            *([exception] * bool(exception)),
        ]
        reason = graph.ranks[found[0]].problem or "; ".join(others)
        return build_diagnosis(graph, "unreadable", found, 0, reason)

    def describe(self, phrases: Phrases) -> list[str]:
        reason = escape(phrases.diagnosis.reason, 300)
        return [
            f"The chain of waits ends at {phrases.describe_ranks(phrases.diagnosis.ranks)}, whose "
            f"flight recorder cannot be read: {reason}",
            *phrases.describe_waiting_ranks(),
        ]


class LateRank(Rule):
    """A rank arrived after the deadline of another."""

    kind = "late"
    fixes = (
        _DEADLINE,
        "Or run the slow part on all ranks at the same time, so that no rank waits.",
        "`phalanx trace` shows the durations on every rank.",
    )

    @staticmethod
    def detect(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
        """Return a diagnosis of ranks that continued after the deadline of those that waited."""
        if graph.first_failure is None or graph.first_failure.outcome != "timeout":
            return None
        found = [number for number in blocking if _arrived_late(graph, number)]
        return (
            build_diagnosis(graph, "late", found, graph.get_own_code_start(found[0]))
            if found
            else None
        )

    def describe(self, phrases: Phrases) -> list[str]:
        been = (
            f"had been in {_get_possessive(phrases)} own code"
            f"{phrases.describe_duration(phrases.diagnosis.since)}"
        )
        it = phrases.choose_number("it", "they")
        return [
            f"{phrases.subject} arrived too late: {it} {been} when the other ranks timed out.",
            *phrases.describe_waiting_ranks(),
        ]


def _arrived_late(graph: WaitForGraph, number: int) -> bool:
    rank, status = graph.ranks[number], graph.exits[number]
    later = any(operation.begin > graph.moment for operation in (*rank.history, *rank.open))
    is_own_end = status.reason in ("completed", "exited") or get_phalanx_error(rank) != ""
    return number not in graph.waits and (later or (is_own_end and status.time > graph.moment))


class BusyRank(Rule):
    """A rank is in its own code while others wait for it."""

    kind = "busy"

    @staticmethod
    def detect(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
        """Return a diagnosis of ranks in their own code, if any."""
        found = [number for number in blocking if graph.current_operation(number) is None]
        if not found:
            return None
        return build_diagnosis(
            graph, "busy", found, min(graph.get_own_code_start(number) for number in found)
        )

    def describe(self, phrases: Phrases) -> list[str]:
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

    def suggest_fixes(self, phrases: Phrases) -> list[str]:
        graph = phrases.graph
        stack = suggest_stack_dump(graph, phrases.diagnosis.ranks)
        return [
            *([stack] if graph.job.running else []),
            "Check the code after that line that only this rank runs: an infinite loop, `if rank "
            "== 0:` around slow work (a checkpoint, an evaluation, a download), or more data than "
            "the other ranks have.",
            _DEADLINE,
            "`phalanx watch` shows live which rank the others wait for.",
        ]


class StuckRank(Rule):
    """A rank is in an operation and waits for no other rank."""

    kind = "stuck"

    def describe(self, phrases: Phrases) -> list[str]:
        side = phrases.diagnosis.sides[0]
        been = phrases.choose_tense(phrases.choose_number("has been", "have been"), "had been")
        since = phrases.describe_duration(phrases.diagnosis.since)
        do = phrases.choose_tense(phrases.choose_number("does", "do"), "did")
        return [
            f"{phrases.subject} {been} in {phrases.describe_call(side)}{since}, and {do} not wait "
            "for any rank.",
            *phrases.describe_waiting_ranks(),
        ]

    def suggest_fixes(self, phrases: Phrases) -> list[str]:
        return BusyRank().suggest_fixes(phrases)


def _diagnose_stuck(graph: WaitForGraph, blocking: list[int], waiters: list[int]) -> Diagnosis:
    found = [n for n in blocking if n in graph.waits and graph.waits[n].operation.waiting_for < 0]
    if found:
        since = min(graph.waits[number].operation.begin for number in found)
        return build_diagnosis(graph, "stuck", found, since)
    reason = "ranks wait, but their flight recorders do not show for which ranks"
    return Diagnosis("unknown", waiting=build_sides(graph, waiters), reason=reason)


def _get_possessive(phrases: Phrases) -> str:
    return phrases.choose_number("its", "their")


def _describe_process_state(phrases: Phrases, rank: int) -> str:
    """Describe the process state of a rank that is in its own code; empty if not live."""
    process = phrases.graph.ranks[rank].process
    state = _PROCESS_STATES.get(process.state) if process is not None and phrases.is_live else None
    return f"; {state}" if state else ""


def _describe_pauses(phrases: Phrases, rank: int) -> list[str]:
    """Return evidence for or against a hang: earlier pauses, and reports during this one."""
    graph, known = phrases.graph, []
    since = graph.get_own_code_start(rank)
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
