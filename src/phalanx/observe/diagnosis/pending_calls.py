"""Remote calls that have been pending for a long time, and the workers that delay them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.blocked_ranks import LONG_WAIT
from phalanx.observe.diagnosis.diagnosis import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.observe.call_log_reader import Call, Worker
    from phalanx.observe.diagnosis.wait_for_graph import WaitForGraph
    from phalanx.observe.model import Job, Rank

__all__ = [
    "PendingCall",
    "check_unanswered_calls",
    "find_blocking_calls",
    "find_rank",
    "list_pending_calls",
]


@dataclass(frozen=True)
class PendingCall:
    """A pending remote call with its caller and, if known, its callee."""

    call: Call
    caller: Worker
    callee: Worker | None

    @property
    def executed_since(self) -> int | None:
        """The time at which the callee began to execute it (monotonic ns); None if it has not."""
        if self.callee is not None:
            for call in self.callee.executed:
                if (call.peer, call.number) == (self.caller.id, self.call.number):
                    return call.since
        return None


def list_pending_calls(job: Job) -> list[PendingCall]:
    """Return all pending calls, the oldest first."""
    by_id = {worker.id: worker for worker in job.workers}
    calls = [
        PendingCall(call, worker, by_id.get(call.peer))
        for worker in job.workers
        for call in worker.made
    ]
    return sorted(calls, key=lambda each: each.call.since)


def find_blocking_calls(calls: Iterable[PendingCall]) -> list[PendingCall]:
    """Return the calls whose callee has no pending call itself; none if all workers form cycles."""
    calls = list(calls)
    waiting = {each.caller.id for each in calls if each.call.peer != each.caller.id}
    return [each for each in calls if each.call.peer not in waiting]


def check_unanswered_calls(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis of the workers that delay calls, or of all workers of a cycle."""
    calls = [c for c in list_pending_calls(graph.job) if c.call.since <= graph.moment - LONG_WAIT]
    if not calls:
        return None
    ranks = {find_rank(graph.job, each.callee) for each in find_blocking_calls(calls) or calls}
    numbers = tuple(sorted(rank.rank for rank in ranks if rank is not None))
    return Diagnosis("unanswered", numbers, calls[0].call.since)


def find_rank(job: Job, worker: Worker | None) -> Rank | None:
    """Return the rank that runs in a worker's process; None if it is not a rank of this host."""
    return next((rank for rank in job.ranks if worker and rank.pid == worker.pid), None)
