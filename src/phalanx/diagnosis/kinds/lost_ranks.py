"""Ranks that ended, or aborted their group, while others needed them."""

from __future__ import annotations

import math
import re
import signal
from typing import TYPE_CHECKING

from phalanx.diagnosis.exit_reasons import (
    get_group_error,
    get_last_record_time,
    parse_group_error,
)
from phalanx.diagnosis.formatting import format_ranks, join_texts
from phalanx.diagnosis.kinds.diagnosis import KINDS, Diagnosis, build_sides
from phalanx.diagnosis.kinds.mismatches import UnsentMessage
from phalanx.diagnosis.wait_for_graph import RANK_EXIT_PREFIXES
from phalanx.recorder.exception_hook import SESSION_ENDED
from phalanx.system.processes import signal_name

if TYPE_CHECKING:
    from phalanx.diagnosis.model import Group
    from phalanx.diagnosis.wait_for_graph import WaitForGraph

_ABORTED_BY = re.compile(r"\baborted by rank (\d{1,5})\b")

_STORE_LOST = re.compile(r"\bDist(?:Network|Store)Error\b")

_MEMORY = "Use less memory: a smaller batch, fewer ranks, fewer DataLoader workers."

_OTHER_SIZE = re.compile(r"\bop\.preamble\.length <= op\.nbytes\b")

_KNOWN_ERRORS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (
        re.compile(r"\bDataLoader worker \(pid.*(signal: Killed|exited unexpectedly)"),
        (
            "A worker process of its DataLoader was lost. If nobody sent it SIGKILL, the kernel "
            "did because memory ran out: look for the worker's pid in `journalctl -k | grep -i "
            "'killed process'` (or `dmesg`), and check the memory limit of the container or of "
            "the batch job.",
            "Use fewer workers (`num_workers`), or a smaller batch. With `num_workers=0`, errors "
            "of the dataset are raised in the rank.",
        ),
    ),
    (
        re.compile(r"\bDataLoader worker \(pid"),
        (
            "A worker process of its DataLoader crashed: with `num_workers=0`, the dataset runs in "
            "the rank, and the rank's stderr shows the location.",
        ),
    ),
    (re.compile(r"^MemoryError|\bout of memory\b|can't allocate memory"), (_MEMORY,)),
    (
        re.compile(r"Expected to have finished reduction in the prior iteration"),
        (
            "Some parameters of the model did not contribute to the loss: pass "
            "`find_unused_parameters=True` to DistributedDataParallel, or use all parameters on "
            "every rank.",
        ),
    ),
)


class _LostRank(Diagnosis):
    """A rank has ended by itself."""

    @property
    def code(self) -> int | None:
        """The exit code of the (first) rank at fault; None if unknown."""
        return self.exit_status.code

    def describe_end(self) -> str:
        """Describe when and where the rank at fault ended."""
        return f"{self.describe_time(self.exit_status.time)}{self.describe_single_location()}"


class KilledRank(_LostRank):
    """A rank was killed by a signal."""

    kind = "killed"

    def describe_cause(self) -> list[str]:
        name = signal_name(-self.code) if self.code is not None else "a signal"
        verb = "was" if self.is_single else "were"
        reason = f": {self.escape_reason(300)}" if self.reason else "."
        return [f"{self.subject} {verb} killed by {name}{self.describe_end()}{reason}"]

    def suggest_fixes(self) -> list[str]:
        match -self.code if self.code is not None else None:
            case signal.SIGKILL:
                return [
                    "If nobody sent the signal, the kernel did because memory ran out: look for "
                    "the pid in `journalctl -k | grep -i 'killed process'` (or `dmesg`), and check "
                    "the memory limit of the container or of the batch job.",
                    _MEMORY,
                ]
            case signal.SIGTERM | signal.SIGINT | signal.SIGHUP | signal.SIGXCPU:
                return [
                    "Another process terminated it: check the log of the scheduler (a time limit, "
                    "a node that is drained), and the programs on this machine that send signals."
                ]
            case signal.SIGABRT if _OTHER_SIZE.search(self.reason):
                return [
                    "Gloo ends a process that gives a collective a smaller tensor than another "
                    "rank does: compare the sizes at the call that its stderr shows.",
                    *KINDS["tensor"].fixes,
                ]
            case signal.SIGSEGV | signal.SIGBUS | signal.SIGABRT | signal.SIGILL | signal.SIGFPE:
                return [
                    "It crashed in native code: the Python stack is at the end of the stderr of "
                    f"{format_ranks(self.ranks)} (with PYTHONFAULTHANDLER=1, which "
                    "`phalanx run` sets).",
                    "For the native stack: `ulimit -c unlimited`, run again, `gdb python core`.",
                ]
        return [
            "Look for the sender of the signal at the end of its output and in `journalctl -k`.",
        ]


class ExitedRank(_LostRank):
    """A rank ended with an exit code of its own."""

    kind = "exited"
    fixes = ("Look at the end of its output, and for `sys.exit` and `os._exit` in its code.",)

    def describe_cause(self) -> list[str]:
        return [f"{self.subject} ended with exit code {self.code}{self.describe_end()}."]


class FailedRank(_LostRank):
    """A rank ended by an exception."""

    kind = "failed"

    def describe_cause(self) -> list[str]:
        return [f"{self.subject} failed{self.describe_end()}: {self.escape_reason(300)}"]

    def suggest_fixes(self) -> list[str]:
        known = [steps for pattern, steps in _KNOWN_ERRORS if pattern.search(self.reason)]
        place = f"The traceback is in the stderr of {format_ranks(self.ranks)}"
        if not self.is_single:
            place = "Each of these ranks raised it by itself; the stderr of one has its traceback"
        others = [rank for rank in self.graph.ranks if rank not in self.ranks]
        follow = "; the exceptions of the other ranks follow from it" if others else ""
        return [f"{place}{follow}.", *(known[0] if known else ())]


class VanishedRank(KilledRank):
    """A rank's process is gone for an unknown reason."""

    kind = "vanished"

    def describe_cause(self) -> list[str]:
        text = f"{self.subject} disappeared without recording an exit"
        if self.is_single:
            end = "it was killed by a signal or called os._exit."
            return [f"{text}{self.describe_end()}: {end}"]
        places = self.locate_sides(self.sides[:4])
        last = [f"At the end: {join_texts(places)}."] if places else []
        return [f"{text}; they were probably killed.", *last]

    def suggest_fixes(self) -> list[str]:
        launch = (
            "Start the job with `phalanx run` or `phalanx.launch`, which record how each rank ends."
        )
        return [*([] if self.graph.job.launcher else [launch]), *super().suggest_fixes()]


class AbortedGroup(Diagnosis):
    """A rank aborted the group."""

    kind = "aborted"
    fixes = ("Look at the output of the rank that aborted the group.",)

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if the first failure is that a group was aborted."""
        failure = graph.first_failure
        if failure is None or failure.outcome != "aborted":
            return None
        aborter = _find_aborter(graph, failure.group)
        if aborter is None:
            waiting = build_sides(graph, sorted(graph.waits))
            reason = graph.find_exception()
            return cls(graph, (), graph.moment, waiting=waiting, reason=reason)
        reason = _get_abort_reason(graph, aborter, failure.group)
        if (
            graph.exits[aborter].is_own_failure
            and not get_group_error(graph.ranks[aborter])
            and reason.startswith(RANK_EXIT_PREFIXES)
        ):
            return _diagnose_lost_ranks(graph, [aborter])
        return cls.by_rank(graph, aborter, reason)

    @classmethod
    def by_rank(cls, graph: WaitForGraph, aborter: int, reason: str) -> Diagnosis:
        """Return the diagnosis of a rank that aborted a group for which all others wait."""
        sides = build_sides(graph, [aborter])
        waiting = build_sides(graph, sorted(graph.waits.keys() - {aborter}))
        return cls(graph, (aborter,), graph.moment, sides, waiting, reason=reason)

    def describe_cause(self) -> list[str]:
        reason, time = self.escape_reason(400), self.describe_time(self.since)
        if not self.ranks:
            return [f"The group was aborted{time}" + (f": {reason}" if reason else ".")]
        text = f"{self.subject} aborted the group{time}{self.describe_location(self.ranks[0])}"
        return [f'{text}: "{reason}"' if reason else f"{text} without giving a reason."]


# Detectors that may find several kinds.


def check_unformed_group(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a group could not be formed, for example for a wrong world size.

    Groups that only wait for absent ranks are not considered here.
    """
    failure = graph.first_failure
    if failure is None or failure.operation.kind != "join" or failure.outcome != "system":
        return None
    # The cause may be a rank that has ended and that hosted the store.
    if gone := [n for n in _list_failed_ranks(graph) if graph.is_gone(n)]:
        return _diagnose_lost_ranks(graph, gone)
    number = failure.rank.rank
    reason = failure.rank.exception or "it could not form the group"
    # The host of the store may also have ended while it waited, before it had a flight recorder.
    absent = [n for n in graph.ranks if graph.never_joined(n) and not graph.is_on_other_host(n)]
    if absent and _STORE_LOST.search(reason):
        return KINDS["missing"].of_ranks(graph, absent, failure.operation.begin, reason)
    return FailedRank.of_ranks(graph, [number], graph.moment, reason)


def check_peer_loss(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a rank was lost to its peers or had left the group."""
    failure = graph.first_failure
    if failure is None or failure.outcome not in ("peer_lost", "left"):
        return None
    group = failure.group
    members = graph.get_group_ranks(group).values()
    if failed := [n for n in members if _has_failed_in_group(graph, n, group)]:
        first = min(failed, key=lambda n: (graph.exits[n].time or math.inf, n))
        if graph.exits[first].is_own_failure:
            return _diagnose_lost_ranks(graph, [first])
        # The program caught the exception, and the process continues.
        return AbortedGroup.by_rank(graph, first, _get_abort_reason(graph, first, group))
    unnotified = [
        n for n in members if n not in graph.failures and not get_group_error(graph.ranks[n])
    ]
    exits = {n: graph.exits[n] for n in unnotified}
    gone = [n for n, status in exits.items() if status.is_own_failure or status.has_finished]
    left: list[int] = []
    if failure.outcome == "left":
        records = {n: graph.find_group_record(n, group) for n in unnotified}
        left = [n for n, record in records.items() if record is not None and record.left]
    # A message waits for its peer, whoever else has gone.
    peer = graph.get_global_rank(failure.group, failure.operation.peer)
    if failure.operation.is_message and peer in (*left, *gone):
        return _diagnose_lost_ranks(graph, [peer])
    return _diagnose_lost_ranks(graph, left or gone)


def check_signal_handler(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a signal handler raised within an operation.

    KeyboardInterrupt is not considered here.
    """
    if graph.first_failure is None or graph.first_failure.outcome != "interrupted":
        return None
    if any(status.reason == "interrupted" for status in graph.exits.values()):
        return None
    failed = [number for number, status in graph.exits.items() if status.reason == "failed"]
    raised = [number for number in failed if not get_group_error(graph.ranks[number])]
    return _diagnose_lost_ranks(graph, raised)


def check_exit(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a rank ended by itself and no other failure is known."""
    if graph.first_failure is not None or graph.recovered:
        return None
    return check_any_exit(graph)


def check_blocking_ranks(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if ranks that block others have ended."""
    return _diagnose_lost_ranks(graph, [n for n in graph.blocking if graph.is_gone(n)])


def check_any_exit(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a rank ended by itself and not because of another rank's failure."""
    own = [n for n in _list_failed_ranks(graph) if n not in graph.failures]
    return _diagnose_lost_ranks(graph, [n for n in own if not get_group_error(graph.ranks[n])])


def check_unexplained_exit(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if ranks ended because of a failure elsewhere whose cause is unknown."""
    return _diagnose_lost_ranks(graph, _list_failed_ranks(graph))


def _list_failed_ranks(graph: WaitForGraph) -> list[int]:
    return [number for number, status in graph.exits.items() if status.is_own_failure]


def _diagnose_lost_ranks(graph: WaitForGraph, lost: list[int]) -> Diagnosis | None:
    """Return the diagnosis of ranks that have ended or left while others need them, if any."""
    if not lost:
        return None
    first = min(lost, key=lambda number: _get_exit_order(graph, number))
    status = graph.exits[first]
    alike = tuple(sorted(n for n in lost if graph.exits[n].reason == status.reason))
    # The first exception is the cause, unless others have raised the same without one another. A
    # signal or the end of the script may concern many ranks.
    at_fault = (first,) if status.reason == "exited" else alike
    if status.reason == "failed":
        exception = graph.ranks[first].exception
        at_fault = tuple(number for number in alike if graph.ranks[number].exception == exception)
    if not status.is_own_failure:
        for number in graph.find_waiters(at_fault):
            operation = graph.waits[number].operation
            if operation.kind == "recv" and operation.peer >= 0:
                return UnsentMessage.between(graph, [number], first)
    kind = KINDS[status.reason if status.is_own_failure else "finished"]
    return kind(
        graph,
        at_fault,
        status.time,
        build_sides(graph, at_fault),
        build_sides(graph, graph.find_waiters(at_fault)),
        status,
        reason=graph.ranks[first].exception,
    )


def _get_exit_order(graph: WaitForGraph, number: int) -> tuple[int, int, float, int]:
    """Return a sort key: ranks whose end is best known first, of these the earliest."""
    status, rank = graph.exits[number], graph.ranks[number]
    doubt = 2 if not status.is_own_failure else 1 if status.reason == "vanished" else 0
    # If no recorder recorded the monotonic clock, the launcher's clock still orders the ends.
    logged = rank.start.ended if rank.start is not None else None
    return doubt, status.time or get_last_record_time(rank), logged or 0.0, number


def _get_abort_reason(graph: WaitForGraph, number: int, group: Group | None) -> str:
    """Return the recorded reason why a rank aborted a group or its session ended, or ""."""
    own = graph.find_group_record(number, group)
    return own.abort_reason if own is not None else ""


def _find_aborter(graph: WaitForGraph, group: Group | None) -> int | None:
    """Return the rank that aborted a group; None if it is unknown.

    It is a member that recorded a reason, else a member that left without a failed operation, else
    the rank that the error message names.
    """
    members = sorted(graph.get_group_ranks(group).values())
    records = {number: own for number in members if (own := graph.find_group_record(number, group))}
    with_reason = [number for number, own in records.items() if own.abort_reason]
    left = [number for number, own in records.items() if own.left and number not in graph.failures]
    if with_reason or left:
        return (with_reason or left)[0]
    found = _ABORTED_BY.search(graph.find_exception())
    return graph.get_global_rank(group, int(found[1])) if found else None


def _has_failed_in_group(graph: WaitForGraph, number: int, group: Group | None) -> bool:
    """Return whether an exception of a rank's own ended its session, and thus left the group."""
    reason = _get_abort_reason(graph, number, group)
    own = not get_group_error(graph.ranks[number])
    return (
        own
        and reason.startswith(SESSION_ENDED)
        and not parse_group_error(reason.removeprefix(SESSION_ENDED))
    )
