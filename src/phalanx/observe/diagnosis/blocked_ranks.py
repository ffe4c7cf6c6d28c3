"""Waiting ranks, and the ranks that ultimately block them.

The rules follow each waiting rank to the ranks that it waits for, and so on. A path ends at a rank
that does not wait, which blocks all the others. A path without an end is a cycle: its ranks wait
for each other (`deadlocks`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.deadlocks import diagnose_deadlock, find_cycle
from phalanx.observe.diagnosis.diagnosis import Diagnosis, build_diagnosis, build_sides
from phalanx.observe.diagnosis.exit_reasons import get_last_record_time, get_phalanx_error
from phalanx.observe.diagnosis.messages import diagnose_unsent_message, find_other_message
from phalanx.observe.diagnosis.wait_for_graph import get_group

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.observe.diagnosis.diagnosis import Kind
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph

__all__ = [
    "LONG_WAIT",
    "check_blocked_ranks",
    "diagnose_lost_ranks",
    "diagnose_missing_ranks",
    "diagnose_stopped_ranks",
    "get_own_code_start",
    "is_on_other_host",
    "is_stopped",
    "never_joined",
]

_WAITED = re.compile(r"\bwaited for ((?:rank \d{1,5}(?: \([^)]*\))?(?:, )?)+)")
_RANK = re.compile(r"rank (\d{1,5})")
_STOPPED = re.compile(r"\brank (\d{1,5}) is stopped by a signal\b")

LONG_WAIT = 1_000_000_000
"""Nanoseconds from which a wait is considered a problem if nothing has failed."""


def check_blocked_ranks(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis of the ranks that block others, if a wait is long or was cut short."""
    waiters = [number for number in graph.waits if _needs_explanation(graph, number)]
    if not waiters:
        return None
    reached = _find_reachable(graph, waiters)
    blocking = sorted(number for number in reached if not _is_blocked(graph, number))
    found = (
        _check_lost(graph, blocking)
        or diagnose_stopped_ranks(graph, blocking)
        or _check_missing(graph, blocking)
        or _check_cycle(graph, sorted(reached - {*blocking}))
        or _check_wrong_message(graph, blocking)
        or _check_other_host(graph, blocking)
    )
    if found:
        return found
    blocking = [number for number in blocking if not is_on_other_host(graph, number)]
    return (
        _check_unreadable(graph, blocking)
        or _check_late(graph, blocking)
        or _check_busy(graph, blocking)
        or _diagnose_stuck(graph, blocking, waiters)
    )


def get_own_code_start(graph: WaitForGraph, number: int) -> int:
    """Return when a rank entered its own code, as of the graph's moment; 0 without a recorder."""
    before = graph.previous_operation(number)
    return graph.ranks[number].opened if before is None else before.end


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
    still = graph.is_gone(number) or is_stopped(graph, number)
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


# States of ranks that do not wait, from the most to the least certain.


def _check_lost(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
    lost_ranks = [number for number in blocking if graph.is_gone(number)]
    return diagnose_lost_ranks(graph, lost_ranks) if lost_ranks else None


def diagnose_lost_ranks(graph: WaitForGraph, lost_ranks: list[int]) -> Diagnosis:
    """Return the diagnosis of ranks that have ended or left while others need them."""
    first = min(lost_ranks, key=lambda number: _get_exit_order(graph, number))
    status = graph.exits[first]
    alike = tuple(number for number in lost_ranks if graph.exits[number].reason == status.reason)
    # The first exception is the cause. A signal or the end of the script may concern many ranks.
    at_fault = (first,) if status.reason in ("failed", "exited") else alike
    waiting = graph.find_waiters(at_fault)
    kind = _KINDS.get(status.reason, "finished")
    for number in waiting if kind == "finished" else ():
        operation = graph.waits[number].operation
        if operation.kind == "recv" and operation.peer >= 0:
            return diagnose_unsent_message(graph, [number], first)
    return Diagnosis(
        kind,
        at_fault,
        status.time,
        build_sides(graph, at_fault),
        build_sides(graph, waiting),
        exit_status=status,
        reason=graph.ranks[first].exception,
    )


_KINDS: dict[str, Kind] = {
    "failed": "failed",
    "killed": "killed",
    "exited": "exited",
    "vanished": "vanished",
}


def _get_exit_order(graph: WaitForGraph, number: int) -> tuple[int, int, float, int]:
    """Return a sort key: ranks whose end is best known first, of these the earliest."""
    status, rank = graph.exits[number], graph.ranks[number]
    doubt = 2 if status.reason not in _KINDS else 1 if status.reason == "vanished" else 0
    # If no recorder recorded the monotonic clock, the launcher's clock still orders the ends.
    logged = rank.start.ended if rank.start is not None else None
    return doubt, status.time or get_last_record_time(rank), logged or 0.0, number


def diagnose_stopped_ranks(graph: WaitForGraph, numbers: Iterable[int]) -> Diagnosis | None:
    """Return a diagnosis of the given ranks that are stopped by a signal, if any."""
    found = [number for number in numbers if is_stopped(graph, number)]
    if not found:
        return None
    since = max(get_last_record_time(graph.ranks[number]) for number in found)
    return build_diagnosis(graph, "stopped", found, since)


def is_stopped(graph: WaitForGraph, number: int) -> bool:
    """Return whether a rank is stopped by a signal, or was until its launcher killed it."""
    process = graph.ranks[number].process
    if process is not None and process.state == "stopped":
        return True
    return _ignored_signal(graph, number) or _is_reported_stopped(graph, number)


def _ignored_signal(graph: WaitForGraph, number: int) -> bool:
    """Return whether a rank ignored the signal that ended the others, as a stopped process does.

    If the others reached a deadline, their errors state whether it was stopped.
    """
    status = graph.exits[number]
    if graph.first_failure is not None or status.reason != "launcher" or status.code != -9:
        return False
    others = [other for other in graph.exits.values() if other.is_external]
    if _has_no_recorder(graph, number):
        # It cannot record an interruption, and an interpreter takes some time to exit.
        others = [other for other in others if other.reason != "interrupted"]
    return any(other.reason == "interrupted" or other.code != -9 for other in others)


def _is_reported_stopped(graph: WaitForGraph, number: int) -> bool:
    """Return whether the error of another rank states that this rank was stopped."""
    return any(
        graph.get_global_rank(get_group(failure.rank, failure.operation), int(place)) == number
        for failure in graph.failures.values()
        for place in _STOPPED.findall(failure.rank.exception)
    )


def _check_missing(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
    """Return a diagnosis of ranks that never joined a group that others wait to form."""
    joining = [wait for wait in graph.waits.values() if graph.is_joining(wait.rank)]
    awaited = {number for wait in joining for number in wait.peers}
    found = [n for n in blocking if n in awaited and never_joined(graph, n)]
    begun = [wait.operation.begin for wait in joining]
    return diagnose_missing_ranks(graph, found, min(begun)) if found else None


def never_joined(graph: WaitForGraph, number: int) -> bool:
    """Return whether, as far as is known, a rank has never joined a group."""
    problem = graph.ranks[number].problem
    return _has_no_recorder(graph, number) and not problem and not _has_formed_group(graph, number)


def diagnose_missing_ranks(
    graph: WaitForGraph, numbers: list[int], since: int, reason: str = ""
) -> Diagnosis:
    """Return the diagnosis of ranks that have not joined a group."""
    return build_diagnosis(graph, "missing", numbers, since, reason)


def _has_no_recorder(graph: WaitForGraph, number: int) -> bool:
    return not graph.ranks[number].opened


def _has_formed_group(graph: WaitForGraph, number: int) -> bool:
    """Return whether other ranks recorded a fully formed group of which this rank is a member."""
    return any(
        number in graph.get_group_ranks(group).values()
        for rank in graph.ranks.values()
        for index, group in enumerate(rank.groups)
        if group.sequence
        or any(o.group == index and o.kind == "join" and o.outcome == "ok" for o in rank.history)
    )


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


def is_on_other_host(graph: WaitForGraph, number: int) -> bool:
    """Return whether a rank is probably on another host: it left no trace on this one."""
    rank = graph.ranks[number]
    return graph.job.hosts > 1 and not (rank.opened or rank.pid or rank.problem)


def _check_other_host(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
    """Return a diagnosis of ranks of other hosts, unless an error names a rank of this host."""
    exception = graph.first_failure.rank.exception if graph.first_failure is not None else ""
    there = [number for number in blocking if is_on_other_host(graph, number)]
    named = [number for number in blocking if number in _find_named_ranks(graph, exception)]
    if not there or (named and named[0] not in there):
        return None
    return build_diagnosis(
        graph, "other_host", [n for n in there if n in named] or there, 0, exception
    )


def _find_named_ranks(graph: WaitForGraph, exception: str) -> list[int | None]:
    """Return the ranks that a timed-out operation waited for, according to its error."""
    if graph.first_failure is None or (found := _WAITED.search(exception)) is None:
        return []
    group = get_group(graph.first_failure.rank, graph.first_failure.operation)
    return [graph.get_global_rank(group, int(place)) for place in _RANK.findall(found[1])]


def _check_unreadable(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
    """Return a diagnosis of ranks without a readable flight recorder.

    The recorder may be damaged, of another version, removed or in memory only.
    """
    found = [n for n in blocking if graph.ranks[n].problem or _has_no_recorder(graph, n)]
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


def _check_late(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
    """Return a diagnosis of ranks that continued after the deadline of the ranks that waited."""
    if graph.first_failure is None or graph.first_failure.outcome != "timeout":
        return None
    found = [number for number in blocking if _arrived_late(graph, number)]
    return (
        build_diagnosis(graph, "late", found, get_own_code_start(graph, found[0]))
        if found
        else None
    )


def _arrived_late(graph: WaitForGraph, number: int) -> bool:
    rank, status = graph.ranks[number], graph.exits[number]
    later = any(operation.begin > graph.moment for operation in (*rank.history, *rank.open))
    is_own_end = status.reason in ("completed", "exited") or get_phalanx_error(rank) != ""
    return number not in graph.waits and (later or (is_own_end and status.time > graph.moment))


def _check_busy(graph: WaitForGraph, blocking: list[int]) -> Diagnosis | None:
    found = [number for number in blocking if graph.current_operation(number) is None]
    if not found:
        return None
    return build_diagnosis(
        graph, "busy", found, min(get_own_code_start(graph, number) for number in found)
    )


def _diagnose_stuck(graph: WaitForGraph, blocking: list[int], waiters: list[int]) -> Diagnosis:
    found = [n for n in blocking if n in graph.waits and graph.waits[n].operation.waiting_for < 0]
    if found:
        since = min(graph.waits[number].operation.begin for number in found)
        return build_diagnosis(graph, "stuck", found, since)
    reason = "ranks wait, but their flight recorders do not show for which ranks"
    return Diagnosis("unknown", waiting=build_sides(graph, waiters), reason=reason)
