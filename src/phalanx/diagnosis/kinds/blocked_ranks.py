"""Ranks that ultimately block the waiting ranks, and waiting ranks that block each other.

`WaitForGraph.blocking` follows each waiting rank to the ranks that it waits for, and so on, up to
the ranks that do not wait. If there are none, the ranks wait in a cycle (`check_cycle`).
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from phalanx.diagnosis.exit_reasons import get_group_error, get_last_record_time
from phalanx.diagnosis.formatting import format_duration, format_ranks, join_texts
from phalanx.diagnosis.kinds.diagnosis import (
    CHECK_BRANCHES,
    Diagnosis,
    Side,
    build_sides,
    suggest_stack_dump,
)
from phalanx.diagnosis.kinds.mismatches import UnreceivedMessage, UnsentMessage, suggest_waiting
from phalanx.diagnosis.wait_for_graph import LONG_WAIT, LONGEST_LOOK
from phalanx.system.escape import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.diagnosis.wait_for_graph import WaitForGraph

_WAITED = re.compile(r"\bwaited for ((?:rank \d{1,5}(?: \([^)]*\))?(?:, )?)+)")

_RANK = re.compile(r"rank (\d{1,5})")

_PROCESS_STATES = {
    "running": "its process is running: a long computation or an endless loop",
    "sleeping": "its process is sleeping: it waits for something outside of Phalanx, such as a "
    "lock, a file or another process",
    "disk": "its process is blocked in the kernel, on a disk or a network file system",
}

_DEADLINE = (
    "If it needs that long, give operations more time: "
    "`phalanx.init(timeout=SECONDS)` or `init_process_group(..., timeout=timedelta(...))`."
)

_NEW_GROUP = (
    "If the group has only some of the ranks: every rank of the job must call `new_group`, in the "
    "same order."
)

_STORE_HOST = (
    "Rank 0 may be running: it hosts the store, and leaves no trace until all other ranks have "
    "connected to it."
)


class StoppedRank(Diagnosis):
    """A rank is stopped by a signal, and could be continued."""

    kind = "stopped"

    @classmethod
    def detect_blocking(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of the stopped ranks that block others, if any."""
        return cls._detect_among(graph, graph.blocking)

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of all stopped ranks, if any."""
        return cls._detect_among(graph, sorted(graph.ranks))

    @classmethod
    def _detect_among(cls, graph: WaitForGraph, numbers: Iterable[int]) -> Diagnosis | None:
        found = [number for number in numbers if graph.is_stopped(number)]
        if not found:
            return None
        since = max(get_last_record_time(graph.ranks[number]) for number in found)
        return cls.of_ranks(graph, found, since)

    def describe_cause(self) -> list[str]:
        text = (
            f"{self.subject} {self.conjugate_be(self.ranks)} stopped by a signal (SIGSTOP or "
            f"Ctrl-Z){self.describe_single_location()}"
        )
        time = self.describe_time(self.since)
        last = f"; {self.possessive} last recorded activity was{time}" if time else ""
        texts = [f"{text}{last}."]
        if self.exit_status.reason == "launcher" and self.graph.first_failure is None:
            them = "it" if self.is_single else "them"
            texts.append(f"The signal that ended the other ranks did not end {them}.")
        return texts

    def suggest_fixes(self) -> list[str]:
        known = [pid for n in self.ranks[:16] if (pid := self.graph.ranks[n].pid)]
        pids = " ".join(map(str, known))
        return [
            *([f"Continue it: `kill -CONT {pids}`."] if pids and self.graph.job.running else []),
            "Find the cause of the stop: Ctrl-Z in its terminal, a debugger, a scheduler that "
            "suspends jobs, or `kill -STOP`.",
        ]


class MissingRank(Diagnosis):
    """A rank did not join a new group."""

    kind = "missing"

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of ranks that never joined a group that others wait to form."""
        joining = [wait for wait in graph.waits.values() if graph.is_joining(wait.rank)]
        awaited = {number for wait in joining for number in wait.peers}
        found = [n for n in graph.blocking if n in awaited and graph.never_joined(n)]
        # The others found the store, so its host was started, and waits there for all of them.
        found = [n for n in found if n != graph.job.store_host] or found
        begun = [wait.operation.begin for wait in joining]
        return cls.of_ranks(graph, found, min(begun)) if found else None

    @property
    def _is_elsewhere(self) -> bool:
        """Return whether the ranks are in other operations, instead of joining."""
        return all(side.operation is not None for side in self.sides)

    def describe_cause(self) -> list[str]:
        if self._is_elsewhere:
            called = self.choose_verb("has not called", "have not called", "had not called")
            places = join_texts(self.locate_sides(self.sides, with_verb=True))
            return [f"{self.subject} {called} `new_group`.", f"Instead, {places}."]
        joined = self.choose_verb("has not joined", "have not joined", "did not join")
        texts = [f"{self.subject} {joined} the group."]
        for rank in self.ranks[:4]:
            record = self.graph.ranks[rank]
            if record.start is None and not record.pid:
                texts.append(f"There is no trace of rank {rank}: was it started?")
            elif self.graph.exits[rank].reason == "alive":
                state = _describe_process_state(self.graph, rank)
                texts.append(f"Rank {rank} is alive but has not reached init_process_group{state}.")
            else:
                texts.append(f"Rank {rank} had not reached init_process_group when it was stopped.")
        return texts

    def suggest_fixes(self) -> list[str]:
        if self._is_elsewhere:
            return [_NEW_GROUP, CHECK_BRANCHES]
        graph, ranks = self.graph, self.ranks
        verb = "was" if self.is_single else "were"
        alive = [n for n in ranks if graph.exits[n].reason == "alive" and graph.ranks[n].pid]
        is_host_absent = 0 in ranks and len(ranks) > 1 and graph.exits[0].reason == "absent"
        return [
            *([suggest_stack_dump(graph, alive)] if alive else []),
            f"Check that {format_ranks(ranks)} {verb} started, and look at {self.possessive} "
            "output: every process needs its own RANK and the same WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT. `phalanx run` sets them.",
            *([_STORE_HOST] if is_host_absent else []),
            _NEW_GROUP,
        ]


class FinishedRank(MissingRank):
    """A rank ended or left while others needed it."""

    kind = "finished"
    fixes = (
        "The other ranks call more operations than it does: uneven data (`drop_last=True`, or a "
        "DistributedSampler, gives every rank as many batches), or an early `return`, `break` or "
        "`sys.exit` on one rank.",
        "`phalanx trace` shows where the ranks diverge.",
    )

    def describe_cause(self) -> list[str]:
        rank, failure = self.ranks[0], self.graph.first_failure
        group = next((side.group for side in self.waiting if side.group is not None), None)
        if group is None and failure is not None:  # of an operation that nobody waited for
            group = failure.group
        own = self.graph.find_group_record(rank, group)
        did = f"reached the end of {self.possessive} script"
        since = self.since
        if own is not None and own.left:
            did, since = "left the group", own.left_time
        if self.graph.never_joined(rank):
            did += " before it joined any group"
        if own is not None:
            done = self.graph.count_collectives(rank, own)
            did += f" at {escape(own.left_at.rpartition('/')[2], 60)}" if own.left_at else ""
            did += f", after {done} collective{'s' if done != 1 else ''} of that group"
        it = "it" if self.is_single else "they"
        return [f"{self.subject} finished early{self.describe_time(since)}: {it} {did}."]

    def suggest_fixes(self) -> list[str]:
        if all(self.graph.never_joined(number) for number in self.ranks):
            return super().suggest_fixes()
        waits = [side.operation for side in self.waiting if side.operation is not None]
        is_message = any(each.is_message for each in waits)
        return [*self.fixes, *(suggest_waiting(self.graph) if is_message else ())]


class RankOnOtherHost(Diagnosis):
    """A rank that left no trace is on another host, as is its flight recorder."""

    kind = "other_host"
    fixes = (
        "Run `phalanx explain` on the host of these ranks: their flight recorders are in a "
        "directory there. If it names ranks of this host, and the operation is the same, the link "
        "between the hosts is cut or too slow.",
    )

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of ranks of other hosts, unless an error names a rank of this host."""
        exception = _get_first_exception(graph)
        there = [number for number in graph.blocking if graph.is_on_other_host(number)]
        named = {*_find_named_ranks(graph, exception)}.intersection(graph.blocking)
        if not there or (named and min(named) not in there):
            return None
        return cls.of_ranks(graph, [n for n in there if n in named] or there, 0, exception)

    def describe(self) -> list[str]:
        first = f"The chain of waits ends at {self.describe_ranks(self.ranks)}, on another host."
        reason = self.escape_reason(600)
        return [first, *self.describe_waiting_ranks(), *([reason] if reason else [])]


def _get_first_exception(graph: WaitForGraph) -> str:
    return graph.first_failure.rank.exception if graph.first_failure is not None else ""


def _find_named_ranks(graph: WaitForGraph, exception: str) -> list[int]:
    """Return the ranks that a timed-out operation waited for, according to its error."""
    if graph.first_failure is None or (found := _WAITED.search(exception)) is None:
        return []
    places = graph.get_group_ranks(graph.first_failure.group)
    return [places[int(place)] for place in _RANK.findall(found[1]) if int(place) in places]


class UnreadableRecorder(Diagnosis):
    """A rank is absent, and its flight recorder is unreadable."""

    kind = "unreadable"
    fixes = (
        "Look at that rank's output. If it runs another version of Phalanx, install the same "
        "version everywhere.",
    )

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of ranks without a readable flight recorder.

        The recorder may be damaged, of another version, removed or in memory only.
        """
        blocking = _list_local_blocking(graph)
        found = [n for n in blocking if graph.ranks[n].problem or not graph.ranks[n].opened]
        if not found:
            return None
        exception = _get_first_exception(graph)
        others = ["there is none in the job's directory", *graph.job.problems]
        others += [exception] if exception else []
        reason = graph.ranks[found[0]].problem or "; ".join(others)
        return cls.of_ranks(graph, found, 0, reason)

    def describe_cause(self) -> list[str]:
        return [
            f"The chain of waits ends at {self.describe_ranks(self.ranks)}, whose flight recorder "
            f"cannot be read: {self.escape_reason(300)}"
        ]


def _list_local_blocking(graph: WaitForGraph) -> list[int]:
    return [number for number in graph.blocking if not graph.is_on_other_host(number)]


class LateRank(Diagnosis):
    """A rank arrived after the deadline of another."""

    kind = "late"
    fixes = (
        _DEADLINE,
        "Or run the slow part on all ranks at the same time, so that no rank waits.",
        "`phalanx trace` shows the durations on every rank.",
    )

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of ranks that continued after the deadline of those that waited."""
        if graph.first_failure is None or graph.first_failure.outcome != "timeout":
            return None
        found = [number for number in graph.blocking if _arrived_late(graph, number)]
        return cls.of_ranks(graph, found, graph.get_own_code_start(found[0])) if found else None

    def describe_cause(self) -> list[str]:
        it = "it" if self.is_single else "they"
        since = self.describe_duration(self.since)
        return [
            f"{self.subject} arrived too late: {it} had been in {self.possessive} own code{since} "
            "when the other ranks timed out."
        ]


def _arrived_late(graph: WaitForGraph, number: int) -> bool:
    rank, status = graph.ranks[number], graph.exits[number]
    later = any(operation.begin > graph.moment for operation in rank.records)
    is_own_end = status.reason in ("completed", "exited") or get_group_error(rank) != ""
    return number not in graph.waits and (later or (is_own_end and status.time > graph.moment))


class BusyRank(Diagnosis):
    """A rank is in its own code while others wait for it."""

    kind = "busy"

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of ranks in their own code, if any."""
        blocking = _list_local_blocking(graph)
        found = [number for number in blocking if graph.current_operation(number) is None]
        if not found:
            return None
        return cls.of_ranks(graph, found, min(map(graph.get_own_code_start, found)))

    def describe_cause(self) -> list[str]:
        been = self.choose_verb("has been", "have been", "had been")
        since = self.describe_duration(self.since)
        text = f"{self.subject} {been} in {self.possessive} own code{since}"
        if not self.is_single:
            return [f"{text}.", *self._describe_doubt()]
        rank = self.ranks[0]
        before = self.graph.previous_operation(rank)
        if before is not None:
            text += f", after {self.describe_operation(rank, before)}"
        state = _describe_process_state(self.graph, rank)
        return [f"{text}{state}.", *self._describe_doubt(), *self._describe_pauses()]

    def _describe_doubt(self) -> list[str]:
        """Return what else is known or may be true, if records or processes are not seen."""
        job, records = self.graph.job, [self.graph.ranks[number].recorded for number in self.ranks]
        silent = [job.now - time for time in records if time]
        if self.graph.is_live and silent and min(silent) > LONGEST_LOOK:
            return [
                f"{self.possessive.capitalize()} records have not been looked at for "
                f"{format_duration(min(silent))}: something keeps the interpreter's lock, as a C "
                "extension can."
            ]
        processes = [self.graph.ranks[number].process for number in self.ranks]
        if not any(process is not None and process.state == "unknown" for process in processes):
            return []
        it, has = ("it", "has") if self.is_single else ("they", "have")
        return [
            f"Or {it} {has} ended, which dumps do not show: look at {self.possessive} exit code "
            f"and at the end of {self.possessive} output."
        ]

    def _describe_pauses(self) -> list[str]:
        """Return evidence for or against a hang: earlier pauses, and reports during this one."""
        graph, rank = self.graph, self.graph.ranks[self.ranks[0]]
        known = []
        since = graph.get_own_code_start(rank.rank)
        past = sorted(rank.history, key=lambda operation: operation.begin)
        pauses = [b.begin - a.end for a, b in pairwise(past) if a.end <= b.begin]
        if pauses and max(pauses) >= LONG_WAIT:
            known.append(f"Its longest earlier pause was {format_duration(max(pauses))}.")
        late = [r for r in rank.reports if since + LONG_WAIT < r.time <= graph.moment]
        if reports := [report for report in late if report.step >= 0]:
            last = reports[-1]
            known.append(
                "It continues without the others: it reported step "
                f"{last.step}{self.describe_time(last.time)}."
            )
        return known

    def suggest_fixes(self) -> list[str]:
        stack = suggest_stack_dump(self.graph, self.ranks)
        return [
            *([stack] if self.graph.job.running else []),
            "Check the code after that line that only this rank runs: an infinite loop, `if rank "
            "== 0:` around slow work (a checkpoint, an evaluation, a download), or more data than "
            "the other ranks have.",
            _DEADLINE,
            "`phalanx watch` shows live which rank the others wait for.",
        ]


class StuckRank(BusyRank):
    """A rank is in an operation and waits for no other rank."""

    kind = "stuck"

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis of ranks that wait for no rank in an operation, if any."""
        waits = [graph.waits[number] for number in graph.blocking if number in graph.waits]
        found = [wait for wait in waits if wait.operation.waiting_for < 0]
        if not found:
            return None
        since = min(wait.operation.begin for wait in found)
        return cls.of_ranks(graph, [wait.rank for wait in found], since)

    def describe_cause(self) -> list[str]:
        been = self.choose_verb("has been", "have been", "had been")
        do = self.choose_verb("does", "do", "did")
        since = self.describe_duration(self.since)
        return [
            f"{self.subject} {been} in {self.describe_call(self.sides[0])}{since}, and {do} not "
            "wait for any rank."
        ]


def _describe_process_state(graph: WaitForGraph, rank: int) -> str:
    """Describe the process state of a rank that is in its own code; empty if not live."""
    process = graph.ranks[rank].process if graph.is_live else None
    state = _PROCESS_STATES.get(process.state) if process is not None else None
    return f"; {state}" if state else ""


class GroupOrder(Diagnosis):
    """Ranks use groups in different orders."""

    kind = "order"
    fixes = (
        "Use groups in the same order on every rank, or start the operations with `async_op=True` "
        "and wait for all of them afterwards.",
    )

    @classmethod
    def detect(cls, graph: WaitForGraph) -> Diagnosis | None:
        """Return a diagnosis if ranks waited for each other and one of them detected it."""
        if graph.first_failure is None or graph.first_failure.outcome != "deadlock":
            return None
        groups = [group for rank in graph.ranks.values() for group in rank.groups]
        reasons = [group.abort_reason for group in groups if group.abort_reason]
        reason = reasons[0] if reasons else graph.find_exception()
        waiting = sorted(graph.waits)
        return cls(graph, tuple(waiting), graph.moment, build_sides(graph, waiting), reason=reason)

    def describe_cause(self) -> list[str]:
        places = join_texts(self.locate_sides(self.sides, with_verb=True))
        since = self.describe_duration(self.since)
        wait = "has waited" if self.graph.is_live else "waited"
        texts = [
            f"Ranks use groups in different orders: {places}.",
            f"Each side {wait} for the other{since}.",
        ]
        if len(self.ranks) < sum(len(side.ranks) for side in self.sides):
            texts.append(f"{self.subject} {self.conjugate_be(self.ranks)} in the minority.")
        return texts


class Deadlock(Diagnosis):
    """Ranks wait for each other."""

    kind = "deadlock"
    fixes = (
        "Let one side go first, or use `isend` and `irecv` (`batch_isend_irecv`) and wait after "
        "both are posted.",
        CHECK_BRANCHES,
    )

    def describe_cause(self) -> list[str]:
        places = join_texts(self.locate_sides(self.sides[:6]))
        verb = "have waited" if self.graph.is_live else "waited"
        since = self.describe_duration(self.since)
        return [f"Ranks {verb} for each other{since}: {places}."]


class CutLink(Diagnosis):
    """Ranks of several hosts are in the same operation, and lack data of each other."""

    kind = "link"
    fixes = (
        "Test the network between the hosts, for example by `ping`. A firewall that drops idle "
        "connections looks like this, too.",
    )

    def describe_cause(self) -> list[str]:
        hosts = join_texts(sorted({self.graph.ranks[number].host for number in self.ranks}))
        places = join_texts(self.locate_sides(self.sides))
        verb = "have waited" if self.graph.is_live else "waited"
        since = self.describe_duration(self.since)
        return [
            f"The link between {hosts} is cut or too slow: their ranks are in the same operation.",
            f"Ranks {verb} for each other's data{since}: {places}.",
        ]


def check_cycle(graph: WaitForGraph) -> Diagnosis | None:
    """Return the diagnosis of a cycle, if any, with the minority among the waiting ranks."""
    waiters = graph.blocked
    cycle = graph.find_cycle(waiters)
    if not cycle:
        return None
    operations = [graph.waits[number].operation for number in cycle]
    single = [operation.is_message for operation in operations]
    if any(single) and not all(single):
        return _diagnose_mixed_cycle(graph, cycle, waiters)
    since = max(operation.begin for operation in operations)
    if absent := _find_absent_from_new_group(graph, cycle):
        return MissingRank.of_ranks(graph, absent, since)
    kind: type[Diagnosis] = Deadlock
    if all(single):
        sides = tuple(build_sides(graph, [number])[0] for number in cycle)
    else:
        places = {_identify_operation(graph, number) for number in cycle}
        has_joins = any(operation.kind == "join" for operation in operations)
        if len({place[0] for place in places}) > 1 and not has_joins:
            kind = GroupOrder
        concerned = [number for number in waiters if _identify_operation(graph, number) in places]
        sides = build_sides(graph, concerned)
        hosts = {graph.ranks[number].host for number in concerned}
        if len(places) == 1 and len(hosts) > 1 and not has_joins:
            return CutLink(graph, tuple(concerned), since, sides)
    at_fault = tuple(sorted(_find_minority(sides)))
    others = [n for n in graph.find_waiters(cycle) if all(n not in side.ranks for side in sides)]
    return kind(graph, at_fault, since, sides, build_sides(graph, others))


def _find_absent_from_new_group(graph: WaitForGraph, cycle: list[int]) -> list[int]:
    """Return the ranks that are in other operations while others wait for them to join a group."""
    joining = [number for number in cycle if graph.is_joining(number)]
    awaited = {peer for number in joining for peer in graph.waits[number].peers}
    return sorted(n for n in awaited if n in graph.waits and not graph.is_joining(n))


def _identify_operation(graph: WaitForGraph, number: int) -> tuple[object, ...]:
    operation = graph.waits[number].operation
    group = graph.ranks[number].get_group(operation)
    return (group and group.identity, operation.kind, operation.sequence)


def _find_minority(sides: Sequence[Side]) -> tuple[int, ...]:
    """Return the ranks of the smallest side; of all sides if several are equally small."""
    sizes = sorted(len(side.ranks) for side in sides)
    if len(sizes) > 1 and sizes[0] < sizes[1]:
        return next(side.ranks for side in sides if len(side.ranks) == sizes[0])
    return tuple(number for side in sides for number in side.ranks)


def _diagnose_mixed_cycle(
    graph: WaitForGraph, cycle: list[int], waiters: Sequence[int]
) -> Diagnosis:
    """Return the diagnosis of a cycle that mixes messages and other operations."""
    for kind in ("recv", "send"):
        for number, peer in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            operation = graph.waits[number].operation
            if operation.kind != kind or graph.waits[peer].operation.is_message:
                continue
            same = [n for n in waiters if graph.waits[n].peers == (peer,)]
            alike = [n for n in same if graph.waits[n].operation.kind == kind] or [number]
            if kind == "recv":
                return UnsentMessage.between(graph, alike, peer)
            sides = (*build_sides(graph, alike), *build_sides(graph, [peer]))
            return UnreceivedMessage(graph, tuple(alike), operation.begin, sides)
    return Deadlock(graph, tuple(cycle), 0, build_sides(graph, cycle))
