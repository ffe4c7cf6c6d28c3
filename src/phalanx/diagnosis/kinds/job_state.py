"""Causes outside of the ranks (the system, a user, the launcher), and jobs without a failure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from phalanx.diagnosis.exit_reasons import get_last_record_time
from phalanx.diagnosis.formatting import format_duration, format_ranks
from phalanx.diagnosis.kinds.diagnosis import Diagnosis, build_sides
from phalanx.diagnosis.wait_for_graph import LONG_WAIT
from phalanx.system.processes import signal_name

if TYPE_CHECKING:
    from phalanx.diagnosis.wait_for_graph import FailedOperation, WaitForGraph

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
_SIGNALED = 128
_INTERRUPTED = re.compile(r"\brank (\d{1,5}) was interrupted\b")


class RefusedResource(Diagnosis):
    """The system refused memory or another resource."""

    kind = "system"
    fixes = (
        "Free memory, or raise the limit that was hit (`ulimit -a`, the container's memory); fewer "
        "ranks or groups need less.",
    )

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if the system refused memory or another resource to a rank."""
        failure = graph.first_failure
        if failure is None or failure.outcome in _HANDLED_OUTCOMES:
            return None
        exception = graph.find_exception()
        found = _SYSTEM_ERROR.search(exception)
        refused = graph.get_global_rank(failure.group, int(found[1] or found[2])) if found else None
        ranks = () if refused is None else (refused,)
        sides = build_sides(graph, ranks or [failure.rank.rank])
        return cls(graph, ranks, graph.moment, sides, reason=exception or failure.outcome)

    def describe_cause(self) -> list[str]:
        ranks = self.describe_ranks(self.ranks)
        return [f"The system refused a resource to {ranks}: {self.escape_reason(400)}"]


class InterruptedRank(Diagnosis):
    """A rank was interrupted (Ctrl-C)."""

    kind = "interrupted"
    fixes = ("If you pressed Ctrl-C, nothing.",)

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of the interrupted ranks, if any."""
        ranks = tuple(n for n, status in graph.exits.items() if status.reason == "interrupted")
        if graph.first_failure is not None and graph.first_failure.outcome == "interrupted":
            ranks = ranks or (_find_interrupted_rank(graph, graph.first_failure),)
        if not ranks:
            return None
        sides = build_sides(graph, ranks)
        return cls(graph, ranks, graph.moment, sides, reason=graph.find_exception())

    def describe_cause(self) -> list[str]:
        be = "was" if self.is_single else "were"
        time = self.describe_time(self.since)
        pressed = all(self.graph.exits[n].reason == "interrupted" for n in self.ranks)
        cause = "(Ctrl-C)" if pressed else "by a signal handler that raised an exception"
        place = self.describe_single_location()
        return [f"{self.subject} {be} interrupted {cause}{time}{place}."]


def _find_interrupted_rank(graph: WaitForGraph, failure: FailedOperation) -> int:
    """Return the interrupted rank, according to the first rank that raised because of it."""
    found = _INTERRUPTED.search(failure.rank.exception)
    place = graph.get_global_rank(failure.group, int(found[1])) if found else None
    return failure.rank.rank if place is None else place


class StoppedByLauncher(Diagnosis):
    """The launcher stopped healthy ranks."""

    kind = "launcher"

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of the ranks that the launcher stopped, if any."""
        ranks = tuple(n for n, status in graph.exits.items() if status.reason == "launcher")
        return cls(graph, ranks, graph.moment) if ranks else None

    def describe_cause(self) -> list[str]:
        job, ranks = self.graph.job, format_ranks(self.ranks)
        if job.launcher_lost:
            return [
                f"The launcher (pid {job.launcher}) disappeared without recording an exit: it was "
                "killed by a signal that it cannot handle, such as SIGKILL.",
                f"The kernel then killed {ranks}: no rank had failed before.",
            ]
        stopped = f"The launcher stopped {ranks}"
        # It exits with 128 + N after signal N, and no rank had failed with that code.
        if job.hosts == 1 and job.code is not None and job.code > _SIGNALED:
            by = signal_name(job.code - _SIGNALED)
            stopped = f"The launcher was ended by {by} and stopped {ranks}"
        return [
            f"{stopped}{self.describe_time(self.since)}: no rank had failed, and none had waited "
            "for long."
        ]

    def suggest_fixes(self) -> list[str]:
        if not self.graph.job.launcher_lost:
            return [
                "If you stopped the job, nothing. Otherwise find out which process sent a signal "
                "to the launcher."
            ]
        return [
            "If nobody killed it, the kernel did because memory ran out: look for pid "
            f"{self.graph.job.launcher} in `journalctl -k | grep -i 'killed process'` (or "
            "`dmesg`), and check the memory limit of the container or of the batch job.",
            "To stop a job, send SIGINT or SIGTERM to its launcher (Ctrl-C, `kill`). The launcher "
            "then stops its ranks and records how they ended.",
        ]


class RunningJob(Diagnosis):
    """No failure so far."""

    kind = "running"

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if the job is running."""
        return cls(graph) if graph.is_running else None

    def describe_cause(self) -> list[str]:
        ranks = self.graph.ranks.values()
        if not any(rank.opened for rank in ranks):
            started = "1 process has" if len(ranks) == 1 else f"{len(ranks)} processes have"
            return [f"No rank has joined a group yet; {started} been started."]
        text = (
            f"no rank has failed, and none has waited for longer than {format_duration(LONG_WAIT)}"
        )
        if self.graph.job.source:  # neither what came later nor ranks that need no others are there
            return [f"These records show nothing wrong: {text}."]
        return [f"Nothing is wrong: {text}."]


class EndedJob(Diagnosis):
    """The job ended without a failure."""

    kind = "ended"

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if all ranks completed."""
        if graph.is_running or not all(status.has_finished for status in graph.exits.values()):
            return None
        return cls(graph, since=max(map(get_last_record_time, graph.job.ranks), default=0))

    def describe_cause(self) -> list[str]:
        return ["Nothing went wrong: all ranks completed."]
