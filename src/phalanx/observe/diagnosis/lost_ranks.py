"""Ranks that ended, or aborted their group, while others needed them."""

from __future__ import annotations

import math
import re
import signal
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.diagnosis import Diagnosis, Rule, build_diagnosis, build_sides
from phalanx.observe.diagnosis.exit_reasons import (
    get_last_record_time,
    get_phalanx_error,
    parse_phalanx_error,
)
from phalanx.observe.diagnosis.formatting import format_ranks, join_texts
from phalanx.observe.diagnosis.messages import diagnose_unsent_message
from phalanx.observe.diagnosis.wait_for_graph import RANK_EXIT_PREFIXES
from phalanx.observe.escape import escape
from phalanx.observe.exception_hook import SESSION_ENDED
from phalanx.observe.model import get_group
from phalanx.system.signals import signal_name

if TYPE_CHECKING:
    from phalanx.observe.diagnosis.diagnosis import Kind, Phrases
    from phalanx.observe.diagnosis.wait_for_graph import FailedOperation, WaitForGraph
    from phalanx.observe.model import Group

__all__ = [
    "AbortedGroup",
    "ExitedRank",
    "FailedRank",
    "InterruptedRank",
    "KilledRank",
    "StoppedByLauncher",
    "VanishedRank",
    "check_any_exit",
    "check_exit",
    "check_peer_loss",
    "check_signal_handler",
    "check_unexplained_exit",
    "check_unformed_group",
    "diagnose_lost_ranks",
]

_ABORTED_BY = re.compile(r"\baborted by rank (\d{1,5})\b")

_INTERRUPTED = re.compile(r"\brank (\d{1,5}) was interrupted\b")

_STORE_LOST = re.compile(r"\bDist(?:Network|Store)Error\b")

_KINDS: dict[str, Kind] = {
    "failed": "failed",
    "killed": "killed",
    "exited": "exited",
    "vanished": "vanished",
}

_MEMORY = "Use less memory: a smaller batch, fewer ranks, fewer DataLoader workers."

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


class KilledRank(Rule):
    """A rank was killed by a signal."""

    kind = "killed"

    def describe(self, phrases: Phrases) -> list[str]:
        status = phrases.diagnosis.exit_status
        code = status.code if status is not None else None
        name = signal_name(-code) if code is not None else "a signal"
        verb = "was" if len(phrases.diagnosis.ranks) == 1 else "were"
        return [
            f"{phrases.subject} {verb} killed by {name}{_describe_end(phrases)}.",
            *phrases.describe_waiting_ranks(),
        ]

    def suggest_fixes(self, phrases: Phrases) -> list[str]:
        diagnosis = phrases.diagnosis
        code = diagnosis.exit_status.code if diagnosis.exit_status is not None else None
        match -code if code is not None else None:
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
            case signal.SIGSEGV | signal.SIGBUS | signal.SIGABRT | signal.SIGILL | signal.SIGFPE:
                return [
                    "It crashed in native code: the Python stack is at the end of the stderr of "
                    f"{format_ranks(diagnosis.ranks)} (with PYTHONFAULTHANDLER=1, which "
                    "`phalanx run` sets).",
                    "For the native stack: `ulimit -c unlimited`, run again, `gdb python core`.",
                ]
        return [
            "Look for the sender of the signal at the end of its output and in `journalctl -k`.",
        ]


class ExitedRank(Rule):
    """A rank ended with an exit code of its own."""

    kind = "exited"
    fixes = ("Look at the end of its output, and for `sys.exit` and `os._exit` in its code.",)

    def describe(self, phrases: Phrases) -> list[str]:
        status = phrases.diagnosis.exit_status
        code = status.code if status is not None else None
        return [
            f"{phrases.subject} ended with exit code {code}{_describe_end(phrases)}.",
            *phrases.describe_waiting_ranks(),
        ]


class FailedRank(Rule):
    """A rank ended by an exception."""

    kind = "failed"

    def describe(self, phrases: Phrases) -> list[str]:
        error = escape(phrases.diagnosis.reason, 300)
        return [
            f"{phrases.subject} failed{_describe_end(phrases)}: {error}",
            *phrases.describe_waiting_ranks(),
        ]

    def suggest_fixes(self, phrases: Phrases) -> list[str]:
        diagnosis = phrases.diagnosis
        known = [steps for pattern, steps in _KNOWN_ERRORS if pattern.search(diagnosis.reason)]
        return [
            f"The traceback is in the stderr of {format_ranks(diagnosis.ranks)}; "
            "the exceptions of the other ranks follow from it.",
            *(known[0] if known else ()),
        ]


class VanishedRank(Rule):
    """A rank's process is gone for an unknown reason."""

    kind = "vanished"

    def describe(self, phrases: Phrases) -> list[str]:
        if len(phrases.diagnosis.ranks) > 1:
            first = (
                f"{phrases.subject} disappeared without recording an exit; "
                "they were probably killed."
            )
            return [first, *_describe_last_places(phrases), *phrases.describe_waiting_ranks()]
        return [
            f"{phrases.subject} disappeared without recording an exit{_describe_end(phrases)}: it "
            "was killed by a signal or called os._exit.",
            *phrases.describe_waiting_ranks(),
        ]

    def suggest_fixes(self, phrases: Phrases) -> list[str]:
        launch = (
            "Start the job with `phalanx run` or `phalanx.launch`, which record how each rank ends."
        )
        return [
            *([] if phrases.graph.job.launcher else [launch]),
            *KilledRank().suggest_fixes(phrases),
        ]


class AbortedGroup(Rule):
    """A rank aborted the group."""

    kind = "aborted"
    fixes = ("Look at the output of the rank that aborted the group.",)

    @staticmethod
    def detect(graph: WaitForGraph) -> Diagnosis | None:
        failure = graph.first_failure
        if failure is None or failure.outcome != "aborted":
            return None
        group = get_group(failure.rank, failure.operation)
        aborter = _find_aborter(graph, group)
        if aborter is None:
            waiting = build_sides(graph, sorted(graph.waits))
            return Diagnosis(
                "aborted", (), graph.moment, waiting=waiting, reason=graph.find_exception()
            )
        abort_reason, rank = _get_abort_reason(graph, aborter, group), graph.ranks[aborter]
        if (
            graph.exits[aborter].is_own_failure
            and not get_phalanx_error(rank)
            and abort_reason.startswith(RANK_EXIT_PREFIXES)
        ):
            return diagnose_lost_ranks(graph, [aborter])
        return _diagnose_abort(graph, aborter, abort_reason)

    def describe(self, phrases: Phrases) -> list[str]:
        diagnosis = phrases.diagnosis
        reason = escape(diagnosis.reason, 400)
        if not diagnosis.ranks:
            text = f"The group was aborted{phrases.describe_time(diagnosis.since)}"
            return [
                f"{text}: {reason}" if reason else f"{text}.",
                *phrases.describe_waiting_ranks(),
            ]
        text = (
            f"{phrases.subject} aborted the group{phrases.describe_time(diagnosis.since)}"
            f"{phrases.describe_location(diagnosis.ranks[0])}"
        )
        return [
            f'{text}: "{reason}"' if reason else f"{text} without giving a reason.",
            *phrases.describe_waiting_ranks(),
        ]


class InterruptedRank(Rule):
    """A rank was interrupted (Ctrl-C)."""

    kind = "interrupted"
    fixes = ("If you pressed Ctrl-C, nothing.",)

    @staticmethod
    def detect(graph: WaitForGraph) -> Diagnosis | None:
        ranks = tuple(
            number for number, status in graph.exits.items() if status.reason == "interrupted"
        )
        if graph.first_failure is not None and graph.first_failure.outcome == "interrupted":
            ranks = ranks or (_find_interrupted_rank(graph, graph.first_failure),)
        if not ranks:
            return None
        return Diagnosis(
            "interrupted",
            ranks,
            graph.moment,
            build_sides(graph, ranks),
            reason=graph.find_exception(),
        )

    def describe(self, phrases: Phrases) -> list[str]:
        be = "was" if len(phrases.diagnosis.ranks) == 1 else "were"
        place = (
            phrases.describe_location(phrases.diagnosis.ranks[0])
            if len(phrases.diagnosis.ranks) == 1
            else ""
        )
        time = phrases.describe_time(phrases.diagnosis.since)
        pressed = all(
            phrases.graph.exits[n].reason == "interrupted" for n in phrases.diagnosis.ranks
        )
        cause = "(Ctrl-C)" if pressed else "by a signal handler that raised an exception"
        return [
            f"{phrases.subject} {be} interrupted {cause}{time}{place}.",
            *phrases.describe_waiting_ranks(),
        ]


class StoppedByLauncher(Rule):
    """The launcher stopped healthy ranks."""

    kind = "launcher"

    @staticmethod
    def detect(graph: WaitForGraph) -> Diagnosis | None:
        ranks = tuple(
            number for number, status in graph.exits.items() if status.reason == "launcher"
        )
        return Diagnosis("launcher", ranks, graph.moment) if ranks else None

    def describe(self, phrases: Phrases) -> list[str]:
        if phrases.graph.job.launcher_lost:
            ranks = phrases.diagnosis.ranks
            return [
                f"The launcher (pid {phrases.graph.job.launcher}) disappeared without recording an "
                "exit: it was killed by a signal that it cannot handle, such as SIGKILL.",
                f"The kernel then killed {format_ranks(ranks)}: no rank had failed before.",
            ]
        return [
            f"The launcher stopped {format_ranks(phrases.diagnosis.ranks)}"
            f"{phrases.describe_time(phrases.diagnosis.since)}: no rank had failed, and none had "
            "waited for long."
        ]

    def suggest_fixes(self, phrases: Phrases) -> list[str]:
        graph = phrases.graph
        if not graph.job.launcher_lost:
            return [
                "If you stopped the job, nothing. Otherwise find out which process sent a signal "
                "to the launcher."
            ]
        return [
            "If nobody killed it, the kernel did because memory ran out: look for pid "
            f"{graph.job.launcher} in `journalctl -k | grep -i 'killed process'` (or `dmesg`), and "
            "check the memory limit of the container or of the batch job.",
            "To stop a job, send SIGINT or SIGTERM to its launcher (Ctrl-C, `kill`). The launcher "
            "then stops its ranks and records how they ended.",
        ]


# Rules that may find several kinds.


def check_unformed_group(graph: WaitForGraph) -> Diagnosis | None:
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
    absent = [n for n in graph.ranks if graph.never_joined(n) and not graph.is_on_other_host(n)]
    if absent and _STORE_LOST.search(reason):
        return build_diagnosis(graph, "missing", absent, failure.operation.begin, reason)
    sides, waiting = build_sides(graph, [number]), build_sides(graph, graph.find_waiters([number]))
    status = graph.exits[number]
    return Diagnosis("failed", (number,), graph.moment, sides, waiting, status, reason=reason)


def check_peer_loss(graph: WaitForGraph) -> Diagnosis | None:
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


def check_signal_handler(graph: WaitForGraph) -> Diagnosis | None:
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


def check_exit(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a rank ended by itself and no other failure is known."""
    if graph.first_failure is not None or graph.recovered:
        return None
    return check_any_exit(graph)


def check_any_exit(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if a rank ended by itself and not because of another rank's failure."""
    gone = [number for number, status in graph.exits.items() if status.is_own_failure]
    own = [n for n in gone if n not in graph.failures and not get_phalanx_error(graph.ranks[n])]
    return diagnose_lost_ranks(graph, own) if own else None


def check_unexplained_exit(graph: WaitForGraph) -> Diagnosis | None:
    """Return a diagnosis if ranks ended because of a failure elsewhere whose cause is unknown."""
    gone = [number for number, status in graph.exits.items() if status.is_own_failure]
    return diagnose_lost_ranks(graph, gone) if gone else None


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


def _get_exit_order(graph: WaitForGraph, number: int) -> tuple[int, int, float, int]:
    """Return a sort key: ranks whose end is best known first, of these the earliest."""
    status, rank = graph.exits[number], graph.ranks[number]
    doubt = 2 if status.reason not in _KINDS else 1 if status.reason == "vanished" else 0
    # If no recorder recorded the monotonic clock, the launcher's clock still orders the ends.
    logged = rank.start.ended if rank.start is not None else None
    return doubt, status.time or get_last_record_time(rank), logged or 0.0, number


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
    found = _ABORTED_BY.search(graph.find_exception())
    return graph.get_global_rank(group, int(found[1])) if found else None


def _has_failed_in_group(graph: WaitForGraph, number: int, group: Group | None) -> bool:
    """Return whether an exception of a rank's own ended its session, and thus left the group."""
    abort_reason = _get_abort_reason(graph, number, group)
    own = not get_phalanx_error(graph.ranks[number]) and not parse_phalanx_error(
        abort_reason.removeprefix(SESSION_ENDED)
    )
    return abort_reason.startswith(SESSION_ENDED) and own


def _find_interrupted_rank(graph: WaitForGraph, failure: FailedOperation) -> int:
    """Return the interrupted rank, according to the first rank that raised because of it."""
    found = _INTERRUPTED.search(failure.rank.exception)
    group = get_group(failure.rank, failure.operation)
    place = graph.get_global_rank(group, int(found[1])) if found else None
    return failure.rank.rank if place is None else place


def _describe_end(phrases: Phrases) -> str:
    """Describe when and where the rank at fault ended."""
    diagnosis = phrases.diagnosis
    time = phrases.describe_time(
        diagnosis.exit_status.time if diagnosis.exit_status is not None else 0
    )
    return time + (
        phrases.describe_location(diagnosis.ranks[0]) if len(diagnosis.ranks) == 1 else ""
    )


def _describe_last_places(phrases: Phrases) -> list[str]:
    """Describe the locations of ranks that ended together."""
    places = [
        f"{format_ranks(side.ranks)} {phrases.describe_position(side)}"
        for side in phrases.diagnosis.sides[:4]
    ]
    return [f"At the end: {join_texts(places)}."] if places else []
