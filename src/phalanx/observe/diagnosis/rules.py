"""The rules that find the cause of a hang or a failure, in the order in which they are tried.

Causes are checked before their consequences. The rules look first at the earliest failed operation,
if any, then at ranks that ended by themselves, and then at the wait-for graph (`blocked_ranks`). To
add a kind of diagnosis, add a `Rule` to the module of its topic, and list it here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis import blocked_ranks, lost_ranks
from phalanx.observe.diagnosis.deadlocks import Deadlock, GroupOrder
from phalanx.observe.diagnosis.diagnosis import Diagnosis, Phrases, Rule, build_sides
from phalanx.observe.diagnosis.exit_reasons import get_last_record_time
from phalanx.observe.diagnosis.formatting import format_duration
from phalanx.observe.diagnosis.messages import UnawaitedMessage, UnreceivedMessage, UnsentMessage
from phalanx.observe.diagnosis.mismatches import MismatchedMessage, MismatchedOperation
from phalanx.observe.diagnosis.pending_calls import UnansweredCall
from phalanx.observe.diagnosis.wait_for_graph import LONG_WAIT, WaitForGraph
from phalanx.observe.escape import escape
from phalanx.observe.model import get_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.observe.model import Job

__all__ = ["diagnose", "diagnose_graph", "suggest_fixes", "write_sentences"]

_HANDLED_OUTCOMES = (
    "peer_lost",
    "left",
    "timeout",
    "mismatch",
    "deadlock",
    "aborted",
    "interrupted",
)

_SYSTEM_ERROR = re.compile(
    r"\brank (\d{1,5}) could not get memory|system error on rank (\d{1,5})\b"
)


def diagnose(job: Job) -> Diagnosis:
    """Determine what blocks a job or what ended it; never raises, whatever the job contains."""
    return diagnose_graph(WaitForGraph(job))


def diagnose_graph(graph: WaitForGraph) -> Diagnosis:
    """Do the same as `diagnose` for an existing graph."""
    for detect in _DETECTORS:
        if (diagnosis := detect(graph)) is not None:
            return diagnosis
    return Diagnosis("unknown", reason="the flight recorders do not show it")


def write_sentences(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    """Put a diagnosis into sentences, the ranks at fault first; text from the job is escaped."""
    return _RULES[diagnosis.kind].describe(Phrases(graph, diagnosis))


def suggest_fixes(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    """Return the suggested fixes; empty if nothing is wrong."""
    return _RULES[diagnosis.kind].suggest_fixes(Phrases(graph, diagnosis))


class RefusedResource(Rule):
    """The system refused memory or another resource."""

    kind = "system"
    fixes = (
        "Free memory, or raise the limit that was hit (`ulimit -a`, the container's memory); fewer "
        "ranks or groups need less.",
    )

    @staticmethod
    def detect(graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if the system refused memory or another resource to a rank."""
        failure = graph.first_failure
        if failure is None or failure.outcome in _HANDLED_OUTCOMES:
            return None
        exception = graph.find_exception()
        found = _SYSTEM_ERROR.search(exception)
        group = get_group(failure.rank, failure.operation)
        refused = graph.get_global_rank(group, int(found[1] or found[2])) if found else None
        ranks = () if refused is None else (refused,)
        sides = build_sides(graph, ranks or [failure.rank.rank])
        return Diagnosis("system", ranks, graph.moment, sides, reason=exception or failure.outcome)

    def describe(self, phrases: Phrases) -> list[str]:
        reason = escape(phrases.diagnosis.reason, 400)
        ranks = phrases.describe_ranks(phrases.diagnosis.ranks)
        return [f"The system refused a resource to {ranks}: {reason}"]


class RunningJob(Rule):
    """No failure so far."""

    kind = "running"

    def describe(self, phrases: Phrases) -> list[str]:
        ranks = phrases.graph.ranks.values()
        if not any(rank.opened for rank in ranks):
            started = "1 process has" if len(ranks) == 1 else f"{len(ranks)} processes have"
            return [f"No rank has joined a group yet; {started} been started."]
        return [
            "Nothing is wrong: no rank has failed, and none has waited for longer than "
            f"{format_duration(LONG_WAIT)}."
        ]


class EndedJob(Rule):
    """The job ended without a failure."""

    kind = "ended"

    def describe(self, phrases: Phrases) -> list[str]:  # noqa: ARG002
        return ["Nothing went wrong: all ranks completed."]


class UnknownCause(Rule):
    """The cause cannot be determined."""

    kind = "unknown"
    fixes = (
        "`phalanx jobs` lists all jobs.",
        "Look at the output of the ranks.",
    )

    def describe(self, phrases: Phrases) -> list[str]:
        return [
            f"The cause is unknown: {escape(phrases.diagnosis.reason, 400)}.",
            *phrases.describe_waiting_ranks(),
        ]


def _check_no_records(graph: WaitForGraph) -> Diagnosis | None:
    ranks = graph.job.ranks
    if any(rank.opened or rank.start is not None for rank in ranks):
        return None
    problems = [f"rank {rank.rank}: {rank.problem}" for rank in ranks if rank.problem]
    problems += graph.job.problems
    return Diagnosis("unknown", reason="; ".join(problems) or "no rank has left a flight recorder")


def _check_failed_operation(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if an operation failed for an unknown reason."""
    if graph.first_failure is None:
        return None
    waiting = build_sides(graph, [graph.first_failure.rank.rank])
    reason = graph.find_exception() or f"an operation ended with {graph.first_failure.outcome}"
    return Diagnosis("unknown", (), graph.moment, waiting=waiting, reason=reason)


def _check_no_failure(graph: WaitForGraph) -> Diagnosis | None:
    reasons = {status.reason for status in graph.exits.values()}
    if reasons <= {"completed", "left"} and not graph.is_running:
        return Diagnosis(
            "ended", since=max((get_last_record_time(rank) for rank in graph.job.ranks), default=0)
        )
    return Diagnosis("running") if graph.is_running else None


_DETECTORS: tuple[Callable[[WaitForGraph], Diagnosis | None], ...] = (
    _check_no_records,
    MismatchedOperation.detect,
    UnawaitedMessage.detect,
    lost_ranks.AbortedGroup.detect,
    lost_ranks.check_unformed_group,
    RefusedResource.detect,
    lost_ranks.check_peer_loss,
    lost_ranks.check_signal_handler,
    lost_ranks.check_exit,
    blocked_ranks.check_blocked_ranks,
    GroupOrder.detect,
    blocked_ranks.check_stopped_ranks,
    UnansweredCall.detect,
    lost_ranks.InterruptedRank.detect,
    lost_ranks.check_any_exit,
    _check_failed_operation,
    lost_ranks.StoppedByLauncher.detect,
    lost_ranks.check_unexplained_exit,
    _check_no_failure,
)
"""The detection of causes, in the order in which they are tried."""

_RULES: dict[str, Rule] = {
    rule.kind: rule
    for rule in (
        lost_ranks.KilledRank(),
        lost_ranks.ExitedRank(),
        lost_ranks.FailedRank(),
        lost_ranks.VanishedRank(),
        lost_ranks.AbortedGroup(),
        lost_ranks.InterruptedRank(),
        lost_ranks.StoppedByLauncher(),
        blocked_ranks.StoppedRank(),
        blocked_ranks.MissingRank(),
        blocked_ranks.FinishedRank(),
        blocked_ranks.RankOnOtherHost(),
        blocked_ranks.UnreadableRecorder(),
        blocked_ranks.LateRank(),
        blocked_ranks.BusyRank(),
        blocked_ranks.StuckRank(),
        MismatchedOperation(),
        MismatchedMessage(),
        UnsentMessage(),
        UnreceivedMessage(),
        UnawaitedMessage(),
        UnansweredCall(),
        GroupOrder(),
        Deadlock(),
        RefusedResource(),
        RunningJob(),
        EndedJob(),
        UnknownCause(),
    )
}
"""The rule of each kind of diagnosis."""
