"""Descriptions of pending remote calls: the worker that has not answered, and its caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.observe.diagnosis.pending_calls import (
    find_blocking_calls,
    find_rank,
    list_pending_calls,
)
from phalanx.observe.escape import escape
from phalanx.observe.explain.formatting import format_duration

if TYPE_CHECKING:
    from phalanx.observe.call_log_reader import Worker
    from phalanx.observe.diagnosis import WaitForGraph
    from phalanx.observe.diagnosis.pending_calls import PendingCall
    from phalanx.observe.model import Job

__all__ = ["calls_as_json", "describe_blocking_calls", "format_call_lines"]

_RECORDED = 3_000_000_000
"""Nanoseconds within which a callee records that it executes a call."""
_MAX_CALLS = 8
"""Maximum number of calls to show."""


def describe_blocking_calls(graph: WaitForGraph) -> list[str]:
    """Return sentences about the workers that delay calls.

    A worker that waits for another worker is not at fault, except in a cycle, where all are.
    """
    calls = list_pending_calls(graph.job)
    if at_fault := find_blocking_calls(calls):
        return [_describe_call(graph, each) for each in at_fault[:_MAX_CALLS]]
    wait = "wait" if graph.is_live else "waited"
    return [
        f"Workers {wait} for each other's calls:",
        *(_format_line(graph, each) for each in calls[:_MAX_CALLS]),
    ]


def format_call_lines(graph: WaitForGraph, most: int = _MAX_CALLS) -> list[str]:
    """Return a line for each of the oldest pending calls: function, caller, callee, duration."""
    calls = list_pending_calls(graph.job)
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
                for each in list_pending_calls(job)
                if each.caller is worker
            ],
        }
        for worker in job.workers
    ]


def _describe_call(graph: WaitForGraph, each: PendingCall) -> str:
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


def _format_line(graph: WaitForGraph, each: PendingCall) -> str:
    return (
        f"  {escape(each.call.function, 80)}, called by "
        f"{_format_worker(graph.job, each.caller, each.caller.id)} on "
        f"{_format_worker(graph.job, each.callee, each.call.peer)}, "
        f"for {format_duration(graph.moment - each.call.since)}"
    )


def _format_worker(job: Job, worker: Worker | None, number: int, noun: str = "worker") -> str:
    if worker is None:
        return f"{noun} {number}"
    rank = find_rank(job, worker)
    where = "" if rank is None else f"rank {rank.rank}, "
    return f"{noun} '{escape(worker.name, 60)}' ({where}pid {worker.pid})"
