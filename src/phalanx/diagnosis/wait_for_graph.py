"""The wait-for graph of a job's ranks at one moment.

The moment is now while nothing has failed. Otherwise it is the time of the first failure, so that
its consequences (notified peers, ranks that the launcher stops) do not hide it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from phalanx.diagnosis.exit_reasons import (
    ExitStatus,
    determine_exit,
    get_group_error,
    get_last_record_time,
)
from phalanx.diagnosis.model import select_blocking
from phalanx.recorder.exception_hook import SESSION_ENDED

if TYPE_CHECKING:
    from phalanx.diagnosis.model import Group, Job, Operation, Rank

RANK_EXIT_PREFIXES = (SESSION_ENDED, "it left while an operation")
"""Prefixes of the reasons that Phalanx records when it aborts a group because its rank ends."""

LONG_WAIT = 1_000_000_000
"""Nanoseconds from which a wait is considered a problem if nothing has failed."""

LONGEST_LOOK = 8_000_000_000
"""Nanoseconds after which a rank on another backend should have kept its records again: twice the
longest time between two of them."""

_STOPPED = re.compile(r"\brank (\d{1,5}) is stopped by a signal\b")

_SLACK = 2_000_000_000
"""Nanoseconds by which a launcher may notice the end of a rank later than the rank's peers."""

_LOSSES = ("peer_lost", "left", "aborted")
_CONSEQUENCES = (*_LOSSES, "interrupted")
"""Outcomes that ranks stopped from outside cause on the other ranks."""


@dataclass(frozen=True)
class FailedOperation:
    """A failed operation and its rank."""

    rank: Rank
    operation: Operation

    @property
    def outcome(self) -> str:
        """The outcome of the operation."""
        return self.operation.outcome

    @property
    def group(self) -> Group | None:
        """The group of the operation; None if it was not recorded."""
        return self.rank.get_group(self.operation)


@dataclass(frozen=True)
class Wait:
    """A rank that is blocked in an operation.

    Attributes:
        rank: The waiting rank.
        operation: The operation in which it waits.
        peers: The ranks that it waits for, all of them or (`any_of`) one; empty if unknown.
        any_of: Whether one of the peers is enough.
    """

    rank: int
    operation: Operation
    peers: tuple[int, ...]
    any_of: bool = False


class WaitForGraph:
    """A job at the moment that explains its state; ranks are numbers in the job throughout.

    Attributes:
        job: The job.
        ranks: The ranks of the job by their number.
        exits: The end of each rank, or that it is alive.
        recovered: Whether some rank continued after one of its operations had failed.
        failures: The failed operation from which a rank did not recover, by rank.
        first_failure: The first of `failures` without an outside cause; None if there is none.
        moment: The moment, in nanoseconds of the monotonic clock.
        waits: The waits at that moment, by the waiting rank.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ranks = {rank.rank: rank for rank in job.ranks}
        self.exits: dict[int, ExitStatus] = {
            rank.rank: determine_exit(rank, job) for rank in job.ranks
        }
        self.recovered = False
        self.failures = self._find_failures()
        self.first_failure = self._find_first_failure()
        self.moment = self._find_moment()
        self._collective_counts = self._count_collectives()
        self._current_operations = {
            number: self._find_current_operation(number) for number in self.ranks
        }
        self.waits: dict[int, Wait] = {
            number: wait for number in self.ranks if (wait := self._find_wait(number)) is not None
        }

    @property
    def is_running(self) -> bool:
        """Return whether a process of the job may be alive; other machines are not visible."""
        return self.job.running or any(
            status.reason == "other_host" for status in self.exits.values()
        )

    @property
    def is_live(self) -> bool:
        """Return whether the moment is now."""
        return self.is_running and self.first_failure is None

    # Queries.

    def current_operation(self, number: int) -> Operation | None:
        """Return the operation that a rank was in at the moment; None if it was in its own code."""
        return self._current_operations.get(number)

    def previous_operation(self, number: int) -> Operation | None:
        """Return the last operation that a rank ended before the moment; None if none."""
        ended = [o for o in self.ranks[number].history if o.end and o.end < self.moment]
        return max(ended, key=lambda operation: operation.end, default=None)

    def get_group_ranks(self, group: Group | None) -> dict[int, int]:
        """Return the known ranks of a formed group by their number in it."""
        return {} if group is None else self.job.group_ranks.get(group.identity, {})

    def get_global_rank(self, group: Group | None, place: int) -> int | None:
        """Return the rank with a given number in a formed group; None if it is unknown."""
        return self.get_group_ranks(group).get(place)

    def count_collectives(self, number: int, group: Group) -> int:
        """Return the number of collectives of a group that a rank had begun by the moment."""
        return self._collective_counts.get((number, group.identity), 0)

    def find_waiters(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that wait for any of the given ranks, directly or indirectly."""
        given = {*ranks}
        found = {*given}
        while more := {
            n for n, wait in self.waits.items() if n not in found and found.intersection(wait.peers)
        }:
            found |= more
        return sorted(found - given)

    def find_group_record(self, number: int, group: Group | None) -> Group | None:
        """Return a group as another of its ranks recorded it; None if it did not."""
        if group is None or not group.identity or number not in self.ranks:
            return None
        return self.ranks[number].find_group(group.identity)

    def is_gone(self, number: int) -> bool:
        """Return whether, by the moment, a rank had ended by itself or left its groups."""
        status = self.exits[number]
        if not (status.is_own_failure or status.has_finished):
            return False
        if number in self.failures or get_group_error(self.ranks[number]):
            return False  # it was alive to be notified
        if self.first_failure is not None and self.first_failure.outcome in ("timeout", "deadlock"):
            # These outcomes imply that the awaited ranks are alive.
            return 0 < status.time <= self.moment
        return status.time <= self.moment + _SLACK

    def is_joining(self, number: int) -> bool:
        """Return whether, at the moment, a rank was waiting for a new group to form."""
        operation = self.current_operation(number)
        return operation is not None and operation.kind == "join"

    def get_own_code_start(self, number: int) -> int:
        """Return when a rank entered its own code, as of the moment; 0 without a recorder."""
        before = self.previous_operation(number)
        return self.ranks[number].opened if before is None else before.end

    def is_stopped(self, number: int) -> bool:
        """Return whether a rank is stopped by a signal, or was until its launcher killed it."""
        rank = self.ranks[number]
        if rank.process is not None and rank.process.state == "stopped":
            return True
        # A wait that reached its deadline came first: the error of Phalanx says whether the rank
        # was stopped by then. Those of other backends, whose records are kept, do not.
        was_suspended = rank.start is not None and rank.start.suspended
        is_silent = self.first_failure is None or self.first_failure.rank.recorded > 0
        is_moment = is_silent and self.exits[number].reason == "launcher"
        return (was_suspended and is_moment) or self._is_reported_stopped(number)

    def _is_reported_stopped(self, number: int) -> bool:
        """Return whether the error of another rank states that this rank was stopped."""
        return any(
            self.get_global_rank(failure.group, int(place)) == number
            for failure in self.failures.values()
            for place in _STOPPED.findall(failure.rank.exception)
        )

    def never_joined(self, number: int) -> bool:
        """Return whether, as far as is known, a rank has never joined a group."""
        problem = self.ranks[number].problem
        return not self.ranks[number].opened and not problem and not self._has_formed_group(number)

    def _has_formed_group(self, number: int) -> bool:
        """Return whether other ranks recorded a fully formed group with this rank as a member."""
        return any(
            number in self.get_group_ranks(group).values()
            for rank in self.ranks.values()
            for index, group in enumerate(rank.groups)
            if group.sequence
            or any(
                o.group == index and o.kind == "join" and o.outcome == "ok" for o in rank.history
            )
        )

    def is_on_other_host(self, number: int) -> bool:
        """Return whether a rank is probably on another host: it left no trace on this one."""
        rank = self.ranks[number]
        return self.job.hosts > 1 and not (rank.opened or rank.pid or rank.problem)

    def find_exception(self) -> str:
        """Return the exception of the rank whose operation failed first, or of a notified rank."""
        first = [self.first_failure.rank] if self.first_failure is not None else []
        notified = [rank for rank in self.ranks.values() if get_group_error(rank)]
        return next((rank.exception for rank in (*first, *notified) if rank.exception), "")

    # Blocked ranks. A path that follows each waiting rank to the ranks that it waits for ends at a
    # rank that does not wait, which blocks the others, or it never ends: its ranks form a cycle.

    @cached_property
    def unexplained_waiters(self) -> list[int]:
        """The ranks whose wait needs an explanation: a failure cut it short, or it is long."""
        outcome = "ok" if self.first_failure is None else self.first_failure.outcome
        is_cut = outcome not in ("ok", "interrupted")
        return [
            number
            for number, wait in self.waits.items()
            if not self.is_gone(number)
            and (
                (is_cut and wait.operation.outcome != "ok")
                or self.moment - wait.operation.begin >= _get_limit(wait)
            )
        ]

    @cached_property
    def blocking(self) -> list[int]:
        """The ranks that do not wait and ultimately block those of `unexplained_waiters`."""
        return sorted(number for number in self._reachable if not self._is_blocked(number))

    @cached_property
    def blocked(self) -> list[int]:
        """The waiting ranks that block those of `unexplained_waiters`, and these themselves."""
        return sorted(number for number in self._reachable if self._is_blocked(number))

    @cached_property
    def _reachable(self) -> set[int]:
        found: set[int] = set()
        todo = [*self.unexplained_waiters]
        while todo:
            number = todo.pop()
            if number not in found and number in self.ranks:
                found.add(number)
                todo += self.waits[number].peers if self._is_blocked(number) else ()
        return found

    def _is_blocked(self, number: int) -> bool:
        """Return whether other ranks block this rank."""
        wait = self.waits.get(number)
        still = self.is_gone(number) or self.is_stopped(number)
        return wait is not None and bool(wait.peers) and not still

    def find_cycle(self, waiters: Iterable[int]) -> list[int]:
        """Return the shortest cycle of ranks that each wait for the next; empty if there is none.

        The cycle begins with its smallest rank.
        """
        stuck = {*waiters}
        while free := {number for number in stuck if not self._is_stuck(number, stuck)}:
            stuck -= free
        if not stuck:
            return []
        # Each of these ranks waits for another of them, so the walk visits some rank twice.
        number, seen = min(stuck), set[int]()
        while number not in seen:
            seen.add(number)
            number = min(stuck.intersection(self.waits[number].peers))
        return self._find_shortest_cycle(number, stuck)

    def _is_stuck(self, number: int, stuck: set[int]) -> bool:
        wait = self.waits[number]
        peers = stuck.intersection(wait.peers)
        return len(peers) == len(wait.peers) > 0 if wait.any_of else bool(peers)

    def _find_shortest_cycle(self, start: int, stuck: set[int]) -> list[int]:
        paths: deque[Sequence[int]] = deque([[start]])
        seen: set[int] = set()
        while paths:
            path = paths.popleft()
            for peer in sorted(stuck.intersection(self.waits[path[-1]].peers)):
                if peer == start:
                    first = path.index(min(path))
                    return [*path[first:], *path[:first]]
                if peer not in seen:
                    seen.add(peer)
                    paths.append([*path, peer])
        return []

    # The moment.

    def _find_failures(self) -> dict[int, FailedOperation]:
        failures = {}
        for number, rank in self.ranks.items():
            failed = [
                o
                for o in rank.history
                if o.outcome != "ok" and o.end and not _is_cut_by_own_exit(rank, o)
            ]
            if not failed:
                continue
            last = max(failed, key=lambda operation: (operation.end, operation.number))
            if _has_continued(rank, last):
                self.recovered = True
            else:
                failures[number] = FailedOperation(rank, _find_streak_start(rank, failed))
        return failures

    def _find_first_failure(self) -> FailedOperation | None:
        own = [failure for failure in self.failures.values() if not self._is_from_outside(failure)]
        return min(own, key=lambda t: (t.operation.end, t.rank.rank), default=None)

    def _is_from_outside(self, failure: FailedOperation) -> bool:
        if failure.outcome not in _CONSEQUENCES:
            return False
        if failure.outcome == "interrupted":  # this rank, or a rank that notified it
            pressed = any(status.reason == "interrupted" for status in self.exits.values())
            return pressed or self.exits[failure.rank.rank].is_external
        external = {n: status for n, status in self.exits.items() if status.is_external}
        ended = [status.time for status in external.values() if status.time]
        if ended and failure.operation.end < min(ended) - _SLACK:
            return False  # long before any rank was ended
        if failure.outcome == "aborted":  # because a rank of the group was ended from outside
            records = [self.find_group_record(number, failure.group) for number in external]
            return any(
                own is not None and own.abort_reason.startswith(RANK_EXIT_PREFIXES)
                for own in records
            )
        others = {*self.get_group_ranks(failure.group).values()} & {*self.exits}
        others.discard(failure.rank.rank)
        own = [self.exits[number] for number in others if number not in self.failures]
        is_lost = any(status.is_own_failure or status.has_finished for status in own)
        return not is_lost and not others.isdisjoint(external)

    def _find_moment(self) -> int:
        if self.first_failure is not None:
            return self.first_failure.operation.end
        if self.is_running:
            return self.job.now
        ended = [status for status in self.exits.values() if status.time]
        began = [each for each in ended if each.is_own_failure or each.reason == "interrupted"]
        exits = [status.time for status in began]
        exits = exits or [status.time for status in ended if status.is_external]
        # Operations that were cut short by this were under way until then.
        cut = [failure.operation.end for failure in self.failures.values()]
        signs = [get_last_record_time(rank) for rank in self.job.ranks]
        return min([*cut, *exits], default=max(signs, default=self.job.now))

    # The graph.

    def _count_collectives(self) -> dict[tuple[int, int], int]:
        counts: dict[tuple[int, int], int] = {}
        for number, rank in self.ranks.items():
            for operation in rank.records:
                group = rank.get_group(operation)
                if group is None or operation.is_message or operation.begin > self.moment:
                    continue
                key = (number, group.identity)
                counts[key] = max(counts.get(key, 0), operation.sequence)
            for group in rank.groups:  # operations that the history no longer holds
                counts.setdefault((number, group.identity), group.sequence)
        return counts

    def _find_current_operation(self, number: int) -> Operation | None:
        rank = self.ranks[number]
        cut = (o for o in rank.history if self.moment <= o.end)
        candidates = [o for o in (*rank.open, *cut) if o.begin <= self.moment]
        if rank.ending == "failed" and rank.ended <= self.moment:
            # The main thread raised, so it was not blocked by operations of other threads.
            candidates = [operation for operation in candidates if not operation.thread]
        return select_blocking(candidates)

    def _find_wait(self, number: int) -> Wait | None:
        operation = self.current_operation(number)
        if operation is None:
            return None
        group = self.ranks[number].get_group(operation)
        is_assumed = group is not None and group.is_assumed and operation.waiting_for < 0
        any_of = operation.peer < 0 if operation.is_message else is_assumed
        peers = tuple(sorted(set(self._find_peers(number, operation)) - {number}))
        return Wait(number, operation, peers, any_of)

    def _find_peers(self, number: int, operation: Operation) -> Iterable[int]:
        """Return the ranks that an operation under way still waits for."""
        group = self.ranks[number].get_group(operation)
        if operation.kind == "join":
            return self._find_absent(group)
        if operation.is_message and operation.peer < 0:
            return self.get_group_ranks(group).values()
        if not operation.is_message and (late := [*self._find_late(group, operation)]):
            return late
        place = operation.peer if operation.is_message else operation.waiting_for
        single = self.get_global_rank(group, place)
        unreadable = [number for number, rank in self.ranks.items() if rank.problem]
        return unreadable if single is None else [single]

    def _find_late(self, group: Group | None, operation: Operation) -> Iterator[int]:
        """Yield the members of a group that had not reached a collective."""
        for number in self.get_group_ranks(group).values():
            if group is not None and self.count_collectives(number, group) < operation.sequence:
                yield number

    def _find_absent(self, group: Group | None) -> list[int]:
        """Return the ranks that had not begun to join a new group."""
        if group is None:  # the rank's table of groups was full
            return [n for n, rank in self.ranks.items() if not rank.opened and not rank.problem]
        members = group.members or (self.ranks if group.size == len(self.ranks) else ())
        return [n for n in members if n in self.ranks and not self._has_come(self.ranks[n], group)]

    def _has_come(self, rank: Rank, group: Group) -> bool:
        """Return whether a rank had begun to join a group by the moment."""
        for operation in rank.records:
            own = rank.get_group(operation) if operation.kind == "join" else None
            if own is not None and own.name == group.name and own.size == group.size:
                over = operation.outcome != "ok" and operation.end < self.moment
                if operation.begin <= self.moment and not over:
                    return True
        # Only a formed group has an identity.
        formed = (own for own in rank.groups if own.identity and not own.left)
        return any(own.name == group.name and own.size == group.size for own in formed)


def _get_limit(wait: Wait) -> int:
    """Return the nanoseconds from which a wait is a problem if nothing has failed."""
    # Ranks that have all come to a group still have to connect to each other.
    is_connecting = wait.operation.kind == "join" and not wait.peers
    return LONGEST_LOOK if is_connecting else LONG_WAIT


def _has_continued(rank: Rank, failed: Operation) -> bool:
    """Return whether a rank began other operations after one had failed."""
    if get_group_error(rank):
        return False
    if rank.recorded and failed.outcome == "mismatch":  # other backends do not notice it
        return False
    return any(o.outcome == "ok" and o.begin > failed.end for o in rank.records)


def _is_cut_by_own_exit(rank: Rank, operation: Operation) -> bool:
    """Return whether an operation was cut short because its own rank was ending or left the group.

    The group's thread may be in an operation when the main thread raises or leaves.
    """
    group = rank.get_group(operation)
    if operation.outcome not in _LOSSES or get_group_error(rank):
        return False
    if group is not None and operation.waiting_for == group.rank:  # its own loss
        return True
    if rank.ending != "failed":
        return False
    aborted = group is not None and group.abort_reason.startswith(RANK_EXIT_PREFIXES)
    return aborted or operation.end >= rank.ended


def _find_streak_start(rank: Rank, failed: list[Operation]) -> Operation:
    """Return the first operation of a rank's last run of failed operations."""
    last = max(operation.end for operation in failed)
    good = (o.begin for o in rank.history if o.outcome == "ok" and o.begin <= last)
    since = max(good, default=0)
    streak = [operation for operation in failed if operation.end > since] or failed
    return min(streak, key=lambda operation: (operation.end, operation.number))
