"""Remote calls that have been pending for a long time, and the workers that delay them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.diagnosis.formatting import format_duration
from phalanx.diagnosis.kinds.diagnosis import Diagnosis, suggest_stack_dump
from phalanx.diagnosis.wait_for_graph import LONG_WAIT
from phalanx.system.escape import escape

if TYPE_CHECKING:
    from phalanx.diagnosis.model import Call, Job, Rank, Worker
    from phalanx.diagnosis.wait_for_graph import WaitForGraph

_RECORDED = 3_000_000_000
"""Nanoseconds within which a callee records that it executes a call."""

_CHECK_FUNCTION = (
    "Check the called function: an infinite loop, a lock, or a remote call without a timeout. A "
    "function that trains for the whole job is fine."
)

_TIMEOUT = re.compile(
    r"(?:[\w.]*\.)?CallTimeout: .*\(id (\d{1,9}), pid (\d{1,9}) on [^)]*\) took longer than "
)

_MAX_CALLS = 8
"""Maximum number of calls to show."""


class UnansweredCall(Diagnosis):
    """An RPC worker has not answered the call of another worker.

    A worker that waits for another worker is not at fault, except in a cycle, where all are.
    """

    kind = "unanswered"

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of the workers that delay calls, or of all workers of a cycle."""
        pending = _list_pending_calls(graph.job)
        calls = [each for each in pending if each.call.since <= graph.moment - LONG_WAIT]
        if not calls:
            return None
        blocking = _find_blocking_calls(calls) or calls
        ranks = {_find_rank(graph.job, each.callee) for each in blocking}
        numbers = tuple(sorted(rank.rank for rank in ranks if rank is not None))
        return cls(graph, numbers, calls[0].call.since)

    def describe_cause(self) -> list[str]:
        calls = _list_pending_calls(self.graph.job)
        if at_fault := _find_blocking_calls(calls):
            return [_describe_call(self.graph, each) for each in at_fault[:_MAX_CALLS]]
        wait = "wait" if self.graph.is_live else "waited"
        lines = [_format_line(self.graph, each) for each in calls[:_MAX_CALLS]]
        return [f"Workers {wait} for each other's calls:", *lines]

    def suggest_fixes(self) -> list[str]:
        stack = suggest_stack_dump(self.graph, self.ranks)
        return [
            *([stack] if self.graph.job.running and self.ranks else []),
            _CHECK_FUNCTION,
            "Set a timeout, so that the caller can continue: `rpc_sync(..., timeout=SECONDS)`, or "
            "`rpc_timeout` in `rpc_backend_options`.",
        ]


class TimedOutCall(UnansweredCall):
    """An RPC worker did not answer a call in time, and the caller ended with that exception."""

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of the callee if the first rank to fail raised the timeout of a call.

        A callee that waited for another worker is not at fault.
        """
        failed = [number for number, status in graph.exits.items() if status.is_own_failure]
        first = min(failed, key=lambda number: (graph.exits[number].time, number), default=None)
        if first is None or graph.first_failure is not None or graph.recovered:
            return None
        exception = graph.ranks[first].exception
        if (found := _TIMEOUT.match(exception)) is None:
            return None
        number, pid = int(found[1]), int(found[2])
        by_id = {worker.id: worker for worker in graph.job.workers}
        seen: list[int] = []
        while number not in seen and number in by_id and by_id[number].made:
            seen.append(number)
            number, pid = by_id[number].made[0].peer, 0
        if number in seen:  # a cycle
            pids = [by_id[each].pid for each in seen[seen.index(number) :]]
        else:
            pids = [by_id[number].pid if number in by_id else pid]
        ranks = tuple(rank.rank for rank in graph.job.ranks if rank.pid in pids)
        return cls(graph, ranks, graph.exits[first].time, reason=exception) if ranks else None

    def describe_cause(self) -> list[str]:
        time = self.describe_time(self.since)
        return [
            f"{self.subject} did not answer a remote call in time{time}: {self.escape_reason(400)}"
        ]

    def suggest_fixes(self) -> list[str]:
        more = "If it needs that long, give the call more time: `rpc_sync(..., timeout=SECONDS)`."
        return [_CHECK_FUNCTION, more]


@dataclass(frozen=True)
class _PendingCall:
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


def _list_pending_calls(job: Job) -> list[_PendingCall]:
    """Return all pending calls, the oldest first."""
    by_id = {worker.id: worker for worker in job.workers}
    calls = [
        _PendingCall(call, worker, by_id.get(call.peer))
        for worker in job.workers
        for call in worker.made
    ]
    return sorted(calls, key=lambda each: each.call.since)


def _find_blocking_calls(calls: list[_PendingCall]) -> list[_PendingCall]:
    """Return the calls whose callee has no pending call itself; none if all workers form cycles."""
    waiting = {each.caller.id for each in calls if each.call.peer != each.caller.id}
    return [each for each in calls if each.call.peer not in waiting]


def format_call_lines(graph: WaitForGraph, most: int = _MAX_CALLS) -> list[str]:
    """Return a line for each of the oldest pending calls: function, caller, callee, duration."""
    calls = _list_pending_calls(graph.job)
    lines = [_format_line(graph, each) for each in calls[:most]]
    return [*lines, f"  ... and {len(calls) - most} more"] if len(calls) > most else lines


def calls_as_json(job: Job) -> list[dict[str, Any]]:
    """Return the workers and their pending calls for programs; times are Unix seconds."""
    offset = {rank.pid: rank.clock for rank in job.ranks}
    return [
        {
            "id": worker.id,
            "name": worker.name,
            "pid": worker.pid,
            "calls": [
                {
                    "function": each.call.function,
                    "to": each.call.peer,
                    "since": (each.call.since + offset.get(worker.pid, 0)) / 1e9,
                    "executing": each.executed_since is not None,
                }
                for each in _list_pending_calls(job)
                if each.caller is worker
            ],
        }
        for worker in job.workers
    ]


def _describe_call(graph: WaitForGraph, each: _PendingCall) -> str:
    function = escape(each.call.function, 80)
    took = graph.moment - each.call.since
    has = "has" if graph.is_live else "had"
    text = (
        f"{_format_worker(graph.job, each.callee, each.call.peer, 'Worker')} {has} not answered "
        f"the call of {function} by {_format_worker(graph.job, each.caller, each.caller.id)} "
        f"for {format_duration(took)}: it "
    )
    if (since := each.executed_since) is not None:
        return f"{text}{has} been executing it for {format_duration(graph.moment - since)}."
    if each.callee is None:
        return f"{text}left no record of it on this host."
    if took < _RECORDED:
        return f"{text}{'may be' if graph.is_live else 'may have been'} executing it."
    return f"{text}{has} not begun to execute it."


def _format_line(graph: WaitForGraph, each: _PendingCall) -> str:
    return (
        f"  {escape(each.call.function, 80)}, called by "
        f"{_format_worker(graph.job, each.caller, each.caller.id)} on "
        f"{_format_worker(graph.job, each.callee, each.call.peer)}, "
        f"for {format_duration(graph.moment - each.call.since)}"
    )


def _format_worker(job: Job, worker: Worker | None, number: int, noun: str = "worker") -> str:
    if worker is None:
        return f"{noun} {number}"
    rank = _find_rank(job, worker)
    where = "" if rank is None else f"rank {rank.rank}, "
    return f"{noun} '{escape(worker.name, 60)}' ({where}pid {worker.pid})"


def _find_rank(job: Job, worker: Worker | None) -> Rank | None:
    """Return the rank that runs in a worker's process; None if it is not a rank of this host."""
    return next((rank for rank in job.ranks if worker and rank.pid == worker.pid), None)
