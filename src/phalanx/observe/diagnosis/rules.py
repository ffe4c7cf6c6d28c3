"""The cause of a hang or a failure, found by a list of rules that are tried in order.

Causes are checked before their consequences. The rules look first at the earliest failed operation,
if any, then at ranks that ended by themselves, and then at the wait-for graph (`blocked_ranks`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.blocked_ranks import (
    check_blocked_ranks,
    diagnose_lost_ranks,
    diagnose_missing_ranks,
    diagnose_stopped_ranks,
    is_on_other_host,
    never_joined,
)
from phalanx.observe.diagnosis.diagnosis import Diagnosis, Side, build_sides
from phalanx.observe.diagnosis.exit_reasons import (
    get_last_record_time,
    get_phalanx_error,
    parse_phalanx_error,
)
from phalanx.observe.diagnosis.messages import check_unawaited_messages, find_mismatched_message
from phalanx.observe.diagnosis.pending_calls import check_unanswered_calls
from phalanx.observe.diagnosis.wait_for_graph import (
    RANK_EXIT_PREFIXES,
    FailedOperation,
    WaitForGraph,
    get_group,
)
from phalanx.observe.exception_hook import SESSION_ENDED

if TYPE_CHECKING:
    from phalanx.observe.model import Group, Job, Operation

__all__ = ["diagnose", "diagnose_graph"]

_HANDLED_OUTCOMES = (
    "peer_lost",
    "left",
    "timeout",
    "mismatch",
    "deadlock",
    "aborted",
    "interrupted",
)
_ABORTED_BY = re.compile(r"\baborted by rank (\d{1,5})\b")
_INTERRUPTED = re.compile(r"\brank (\d{1,5}) was interrupted\b")
_STORE_LOST = re.compile(r"\bDist(?:Network|Store)Error\b")
_SYSTEM_ERROR = re.compile(
    r"\brank (\d{1,5}) could not get memory|system error on rank (\d{1,5})\b"
)


def diagnose(job: Job) -> Diagnosis:
    """Determine what blocks a job or what ended it; never raises, whatever the job contains."""
    return diagnose_graph(WaitForGraph(job))


def diagnose_graph(graph: WaitForGraph) -> Diagnosis:
    """Do the same as `diagnose` for an existing graph."""
    for rule in _RULES:
        if (diagnosis := rule(graph)) is not None:
            return diagnosis
    return Diagnosis("unknown", reason="the flight recorders do not show it")


# No data.


def _check_no_records(graph: WaitForGraph) -> Diagnosis | None:
    ranks = graph.job.ranks
    if any(rank.opened or rank.start is not None for rank in ranks):
        return None
    problems = [f"rank {rank.rank}: {rank.problem}" for rank in ranks if rank.problem]
    problems += graph.job.problems
    return Diagnosis("unknown", reason="; ".join(problems) or "no rank has left a flight recorder")


# The cause of the first failed operation.


def _check_mismatch(graph: WaitForGraph) -> Diagnosis | None:
    failure = graph.first_failure
    if failure is None or failure.outcome != "mismatch":
        return None
    group = get_group(failure.rank, failure.operation)
    failed = [number for number in sorted(graph.failures) if _has_mismatch(graph, number, group)]
    messages = [number for number in failed if graph.failures[number].operation.is_message]
    collectives = [number for number in failed if number not in messages]
    if len({_get_signature(graph.failures[n].operation) for n in collectives}) < 2:
        for number in messages:
            if (diagnosis := _diagnose_mismatched_message(graph, number)) is not None:
                return diagnosis
    sides = _build_mismatch_sides(graph, _select_latest(graph, collectives) or failed)
    return Diagnosis(
        "branch", _find_minority_callers(sides), graph.moment, sides, reason=_get_exception(graph)
    )


def _has_mismatch(graph: WaitForGraph, number: int, group: Group | None) -> bool:
    """Return whether a rank failed because of a mismatch in this group."""
    failure = graph.failures[number]
    own = get_group(failure.rank, failure.operation)
    same = own is not None and group is not None and own.identity == group.identity
    return failure.outcome == "mismatch" and (same or failure is graph.first_failure)


def _diagnose_mismatched_message(graph: WaitForGraph, number: int) -> Diagnosis | None:
    """Return a diagnosis if a message does not match the recv of this rank."""
    recv = graph.failures[number].operation
    found = find_mismatched_message(graph, number, recv) if recv.kind == "recv" else None
    if found is None:
        return None
    sender, sent = found
    sides = (
        _build_side(graph, [number]),
        Side((sender,), sent, get_group(graph.ranks[sender], sent)),
    )
    return Diagnosis("message", tuple(sorted((number, sender))), graph.moment, sides, instead=sent)


def _select_latest(graph: WaitForGraph, numbers: list[int]) -> list[int]:
    """Return the ranks in the latest collective; the others were notified in an earlier one."""
    sequences = {number: graph.failures[number].operation.sequence for number in numbers}
    return [n for n, sequence in sequences.items() if sequence == max(sequences.values())]


def _get_signature(operation: Operation) -> tuple[object, ...]:
    """Return the arguments that must be the same on all ranks of a collective."""
    return (
        operation.sequence,
        operation.kind,
        operation.dtype,
        operation.count,
        operation.peer,
        operation.op,
    )


def _build_mismatch_sides(graph: WaitForGraph, numbers: list[int]) -> tuple[Side, ...]:
    """Return the sides of a mismatch, the rarest call first.

    Ranks that made the same call at the same call site form one side.
    """
    places: dict[tuple[object, str], list[int]] = {}
    alike: Counter[object] = Counter()
    for number in numbers:
        operation = graph.failures[number].operation
        places.setdefault((_get_signature(operation), operation.site), []).append(number)
        alike[_get_signature(operation)] += 1
    ordered = sorted(places, key=lambda place: (alike[place[0]], places[place]))
    return tuple(_build_side(graph, places[place]) for place in ordered)


def _build_side(graph: WaitForGraph, ranks: list[int]) -> Side:
    failure = graph.failures[ranks[0]]
    return Side(tuple(ranks), failure.operation, get_group(failure.rank, failure.operation))


def _find_minority_callers(sides: tuple[Side, ...]) -> tuple[int, ...]:
    """Return the ranks that made the rarest call; all ranks if several calls are equally rare."""
    callers: dict[object, list[int]] = {}
    for side in sides:
        signature = None if side.operation is None else _get_signature(side.operation)
        callers.setdefault(signature, []).extend(side.ranks)
    few = min(len(ranks) for ranks in callers.values())
    fewest = [ranks for ranks in callers.values() if len(ranks) == few]
    named = fewest[0] if len(fewest) == 1 else [n for ranks in callers.values() for n in ranks]
    return tuple(sorted(named))


def _check_abort(graph: WaitForGraph) -> Diagnosis | None:
    failure = graph.first_failure
    if failure is None or failure.outcome != "aborted":
        return None
    group = get_group(failure.rank, failure.operation)
    aborter = _find_aborter(graph, group)
    if aborter is None:
        waiting = build_sides(graph, sorted(graph.waits))
        return Diagnosis("aborted", (), graph.moment, waiting=waiting, reason=_get_exception(graph))
    abort_reason, rank = _get_abort_reason(graph, aborter, group), graph.ranks[aborter]
    if (
        graph.exits[aborter].is_own_failure
        and not get_phalanx_error(rank)
        and abort_reason.startswith(RANK_EXIT_PREFIXES)
    ):
        return diagnose_lost_ranks(graph, [aborter])
    return _diagnose_abort(graph, aborter, abort_reason)


def _diagnose_abort(graph: WaitForGraph, aborter: int, abort_reason: str) -> Diagnosis:
    return Diagnosis(
        "aborted",
        (aborter,),
        graph.moment,
        build_sides(graph, [aborter]),
        build_sides(graph, sorted(set(graph.waits) - {aborter})),
        reason=abort_reason,
    )


def _get_abort_reason(graph: WaitForGraph, number: int, group: Group | None) -> str:
    """Return the recorded reason why a rank aborted a group or its session ended, or ""."""
    own = graph.find_group_record(number, group) if group is not None else None
    return own.abort_reason if own is not None else ""


def _find_aborter(graph: WaitForGraph, group: Group | None) -> int | None:
    """Return the rank that aborted a group; None if it is unknown.

    It is a member that recorded a reason, else a member that left without a failed operation, else
    the rank that the error message names.
    """
    if group is None:
        return None
    members = sorted(
        number for number in graph.get_group_ranks(group).values() if number in graph.ranks
    )
    records = {number: own for number in members if (own := graph.find_group_record(number, group))}
    with_reason = [number for number, own in records.items() if own.abort_reason]
    left = [number for number, own in records.items() if own.left and number not in graph.failures]
    if with_reason or left:
        return (with_reason or left)[0]
    found = _ABORTED_BY.search(_get_exception(graph))
    return graph.get_global_rank(group, int(found[1])) if found else None


def _check_unformed_group(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a group could not be formed, for example for a wrong world size.

    Groups that only wait for absent ranks are not considered here.
    """
    failure = graph.first_failure
    if failure is None or failure.operation.kind != "join" or failure.outcome != "system":
        return None
    # The cause may be a rank that has ended and that hosted the store.
    gone = [
        number
        for number in graph.ranks
        if graph.is_gone(number) and graph.exits[number].is_own_failure
    ]
    if gone:
        return diagnose_lost_ranks(graph, gone)
    number = failure.rank.rank
    reason = failure.rank.exception or "it could not form the group"
    # The host of the store may also have ended while it waited, before it had a flight recorder.
    absent = [n for n in graph.ranks if never_joined(graph, n) and not is_on_other_host(graph, n)]
    if absent and _STORE_LOST.search(reason):
        return diagnose_missing_ranks(graph, absent, failure.operation.begin, reason)
    sides, waiting = build_sides(graph, [number]), build_sides(graph, graph.find_waiters([number]))
    status = graph.exits[number]
    return Diagnosis("failed", (number,), graph.moment, sides, waiting, status, reason=reason)


def _has_failed_in_group(graph: WaitForGraph, number: int, group: Group | None) -> bool:
    """Return whether an exception of a rank's own ended its session, and thus left the group."""
    abort_reason = _get_abort_reason(graph, number, group)
    own = not get_phalanx_error(graph.ranks[number]) and not parse_phalanx_error(
        abort_reason.removeprefix(SESSION_ENDED)
    )
    return abort_reason.startswith(SESSION_ENDED) and own


def _check_system_error(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if the system refused memory or another resource to a rank."""
    failure = graph.first_failure
    if failure is None or failure.outcome in _HANDLED_OUTCOMES:
        return None
    exception = _get_exception(graph)
    found = _SYSTEM_ERROR.search(exception)
    group = get_group(failure.rank, failure.operation)
    refused = graph.get_global_rank(group, int(found[1] or found[2])) if found else None
    ranks = () if refused is None else (refused,)
    sides = build_sides(graph, ranks or [failure.rank.rank])
    return Diagnosis("system", ranks, graph.moment, sides, reason=exception or failure.outcome)


def _check_peer_loss(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a rank was lost to its peers or had left the group."""
    failure = graph.first_failure
    if failure is None or failure.outcome not in ("peer_lost", "left"):
        return None
    group = get_group(failure.rank, failure.operation)
    members = [number for number in graph.get_group_ranks(group).values() if number in graph.ranks]
    failed = [n for n in members if _has_failed_in_group(graph, n, group)]
    if failed:
        first = min(failed, key=lambda n: (graph.exits[n].time or math.inf, n))
        if graph.exits[first].is_own_failure:
            return diagnose_lost_ranks(graph, [first])
        # The program caught the exception, and the process continues.
        return _diagnose_abort(graph, first, _get_abort_reason(graph, first, group))
    unnotified = [
        n for n in members if n not in graph.failures and not get_phalanx_error(graph.ranks[n])
    ]
    gone = [
        n
        for n in unnotified
        if graph.exits[n].is_own_failure or graph.exits[n].reason in ("completed", "left")
    ]
    if group is not None and failure.outcome == "left":
        gone = [number for number in unnotified if graph.has_left(number, group)] or gone
    return diagnose_lost_ranks(graph, gone) if gone else None


def _check_signal_handler(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a signal handler raised within an operation.

    KeyboardInterrupt is not considered here.
    """
    if graph.first_failure is None or graph.first_failure.outcome != "interrupted":
        return None
    if any(status.reason == "interrupted" for status in graph.exits.values()):
        return None
    failed = [number for number, status in graph.exits.items() if status.reason == "failed"]
    raised = [number for number in failed if not get_phalanx_error(graph.ranks[number])]
    return diagnose_lost_ranks(graph, raised) if raised else None


# No operation failed, or none of them shows the cause.


def _check_exit(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a rank ended by itself and no other failure is known."""
    if graph.first_failure is not None or graph.recovered:
        return None
    return _check_any_exit(graph)


def _check_any_exit(graph: WaitForGraph) -> Diagnosis | None:
    gone = [number for number, status in graph.exits.items() if status.is_own_failure]
    own = [n for n in gone if n not in graph.failures and not get_phalanx_error(graph.ranks[n])]
    return diagnose_lost_ranks(graph, own) if own else None


def _check_detected_deadlock(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if ranks waited for each other and one of them detected the deadlock."""
    if graph.first_failure is None or graph.first_failure.outcome != "deadlock":
        return None
    groups = [group for rank in graph.ranks.values() for group in rank.groups]
    reason = next(
        (group.abort_reason for group in groups if group.abort_reason), _get_exception(graph)
    )
    sides = build_sides(graph, sorted(graph.waits))
    return Diagnosis("order", tuple(sorted(graph.waits)), graph.moment, sides, reason=reason)


def _check_interruption(graph: WaitForGraph) -> Diagnosis | None:
    ranks = tuple(
        number for number, status in graph.exits.items() if status.reason == "interrupted"
    )
    if graph.first_failure is not None and graph.first_failure.outcome == "interrupted":
        ranks = ranks or (_find_interrupted_rank(graph, graph.first_failure),)
    if not ranks:
        return None
    return Diagnosis(
        "interrupted", ranks, graph.moment, build_sides(graph, ranks), reason=_get_exception(graph)
    )


def _find_interrupted_rank(graph: WaitForGraph, failure: FailedOperation) -> int:
    """Return the interrupted rank, according to the first rank that raised because of it."""
    found = _INTERRUPTED.search(failure.rank.exception)
    group = get_group(failure.rank, failure.operation)
    place = graph.get_global_rank(group, int(found[1])) if found else None
    return failure.rank.rank if place is None else place


def _check_stopped(graph: WaitForGraph) -> Diagnosis | None:
    return diagnose_stopped_ranks(graph, sorted(graph.ranks))


def _check_failed_operation(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if an operation failed for an unknown reason."""
    if graph.first_failure is None:
        return None
    waiting = build_sides(graph, [graph.first_failure.rank.rank])
    reason = _get_exception(graph) or f"an operation ended with {graph.first_failure.outcome}"
    return Diagnosis("unknown", (), graph.moment, waiting=waiting, reason=reason)


# Nothing is wrong, or the cause is unknown.


def _check_launcher(graph: WaitForGraph) -> Diagnosis | None:
    ranks = tuple(number for number, status in graph.exits.items() if status.reason == "launcher")
    return Diagnosis("launcher", ranks, graph.moment) if ranks else None


def _check_unexplained_exit(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if ranks ended because of a failure elsewhere whose cause is unknown."""
    gone = [number for number, status in graph.exits.items() if status.is_own_failure]
    return diagnose_lost_ranks(graph, gone) if gone else None


def _check_no_failure(graph: WaitForGraph) -> Diagnosis | None:
    reasons = {status.reason for status in graph.exits.values()}
    if reasons <= {"completed", "left"} and not graph.is_running:
        return Diagnosis(
            "ended", since=max((get_last_record_time(rank) for rank in graph.job.ranks), default=0)
        )
    return Diagnosis("running") if graph.is_running else None


_RULES = (
    _check_no_records,
    _check_mismatch,
    check_unawaited_messages,
    _check_abort,
    _check_unformed_group,
    _check_system_error,
    _check_peer_loss,
    _check_signal_handler,
    _check_exit,
    check_blocked_ranks,
    _check_detected_deadlock,
    _check_stopped,
    check_unanswered_calls,
    _check_interruption,
    _check_any_exit,
    _check_failed_operation,
    _check_launcher,
    _check_unexplained_exit,
    _check_no_failure,
)


def _get_exception(graph: WaitForGraph) -> str:
    """Return the exception of the rank whose operation failed first, or of any notified rank."""
    first = [graph.first_failure.rank] if graph.first_failure is not None else []
    notified = [rank for rank in graph.ranks.values() if get_phalanx_error(rank)]
    return next((rank.exception for rank in (*first, *notified) if rank.exception), "")
