"""Root-cause analysis: from a job to a diagnosis, its description and suggested fixes.

`phalanx.diagnosis.wait_for_graph` reconstructs the state of all ranks at the moment that explains
the failure, and `exit_reasons` determines how each rank ended. Each kind of diagnosis is a subclass
of `Diagnosis` that detects, describes and remedies it. They are grouped by topic: `lost_ranks`,
`blocked_ranks`, `mismatches`, `pending_calls` (remote calls) and `job_state`.
`formatting` formats ranks, operations and times, and escapes text from the job.

The kinds are tried in the order of `_DETECTORS`, causes before their consequences: first the
earliest failed operation, if any, then ranks that ended by themselves, and then the wait-for graph.
To add a kind, add a class to the module of its topic, and its detection to this order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.diagnosis.kinds import lost_ranks
from phalanx.diagnosis.kinds.blocked_ranks import (
    BusyRank,
    GroupOrder,
    LateRank,
    MissingRank,
    RankOnOtherHost,
    StoppedRank,
    StuckRank,
    UnreadableRecorder,
    check_cycle,
)
from phalanx.diagnosis.kinds.diagnosis import KINDS, Diagnosis, Side, UnknownCause
from phalanx.diagnosis.kinds.job_state import (
    EndedJob,
    InterruptedRank,
    RefusedResource,
    RunningJob,
    StoppedByLauncher,
)
from phalanx.diagnosis.kinds.mismatches import (
    MismatchedOperation,
    UnawaitedMessage,
    UnsentMessage,
)
from phalanx.diagnosis.kinds.pending_calls import TimedOutCall, UnansweredCall
from phalanx.diagnosis.wait_for_graph import WaitForGraph

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.diagnosis.model import Job

__all__ = ["KINDS", "Diagnosis", "Side", "diagnose"]


def diagnose(job: Job) -> Diagnosis:
    """Determine what blocks a job or what ended it; never raises, whatever the job contains."""
    graph = WaitForGraph(job)
    for detect in _DETECTORS:
        if (diagnosis := detect(graph)) is not None:
            return diagnosis
    return UnknownCause(graph, reason="the flight recorders do not show it")


_DETECTORS: tuple[Callable[[WaitForGraph], Diagnosis | None], ...] = (
    UnknownCause.detect_without_records,
    MismatchedOperation.detect,
    UnawaitedMessage.detect,
    lost_ranks.AbortedGroup.detect,
    lost_ranks.check_unformed_group,
    RefusedResource.detect,
    lost_ranks.check_peer_loss,
    lost_ranks.check_signal_handler,
    TimedOutCall.detect,
    lost_ranks.check_exit,
    # Ranks that block others, from the most to the least certain cause.
    lost_ranks.check_blocking_ranks,
    StoppedRank.detect_blocking,
    MissingRank.detect,
    check_cycle,
    UnsentMessage.detect,
    RankOnOtherHost.detect,
    UnreadableRecorder.detect,
    LateRank.detect,
    BusyRank.detect,
    StuckRank.detect,
    UnknownCause.detect_long_wait,
    GroupOrder.detect,
    StoppedRank.detect,
    UnansweredCall.detect,
    InterruptedRank.detect,
    lost_ranks.check_any_exit,
    UnknownCause.detect_failed_operation,
    StoppedByLauncher.detect,
    lost_ranks.check_unexplained_exit,
    EndedJob.detect,
    RunningJob.detect,
)
"""The detection of causes, in the order in which they are tried."""
