"""The wait-for graph of a job's ranks at one moment.

The moment is now while nothing has failed. Otherwise it is the time of the first failure, so that
its consequences (notified peers, ranks that the launcher stops) do not hide it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from phalanx.observe.diagnosis.exit_reasons import (
    ExitStatus,
    determine_exit,
    get_last_record_time,
    get_phalanx_error,
)
from phalanx.observe.exception_hook import SESSION_ENDED
from phalanx.observe.model import get_group

if TYPE_CHECKING:
    from phalanx.observe.model import Group, Job, Operation, Rank

__all__ = ["LONG_WAIT", "RANK_EXIT_PREFIXES", "FailedOperation", "Wait", "WaitForGraph"]

RANK_EXIT_PREFIXES = (SESSION_ENDED, "it left while an operation")
"""Prefixes of the reasons that Phalanx records when it aborts a group because its rank ends."""

LONG_WAIT = 1_000_000_000
"""Nanoseconds from which a wait is considered a problem if nothing has failed."""

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
        self._group_ranks = _map_group_ranks(job)
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
        """Return the known ranks of a group by their number in it."""
        return {} if group is None else self._group_ranks.get(group.identity, {})

    def get_global_rank(self, group: Group | None, place: int) -> int | None:
        """Return the rank with a given number in a group; None if it is unknown."""
        return self.get_group_ranks(group).get(place)

    def count_collectives(self, number: int, group: Group) -> int:
        """Return the number of collectives of a group that a rank had begun by the moment."""
        return self._collective_counts.get((number, group.identity), 0)

    def find_waiters(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that wait for any of the given ranks, directly or indirectly."""
        found = set(ranks)
        given = set(found)
        grown = True
        while grown:
            more = {n for n, wait in self.waits.items() if n not in found and found & {*wait.peers}}
            found |= more
            grown = bool(more)
        return sorted(found - given)

    def find_group_record(self, number: int, group: Group) -> Group | None:
        """Return a group as another of its ranks recorded it; None if it did not."""
        groups = self.ranks[number].groups if number in self.ranks else ()
        alike = (known for known in groups if known.identity == group.identity != 0)
        return next(alike, None)

    def is_gone(self, number: int) -> bool:
        """Return whether, by the moment, a rank had ended by itself or left its groups."""
        status = self.exits[number]
        if not status.is_own_failure and status.reason not in ("completed", "left"):
            return False
        if number in self.failures or get_phalanx_error(self.ranks[number]):
            return False  # it was alive to be notified
        if self.first_failure is not None and self.first_failure.outcome in ("timeout", "deadlock"):
            # These outcomes imply that the awaited ranks are alive.
            return 0 < status.time <= self.moment
        return status.time <= self.moment + _SLACK

    def has_left(self, number: int, group: Group) -> bool:
        """Return whether a rank has left a group."""
        known = self.find_group_record(number, group)
        return known is not None and known.left

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
        process = self.ranks[number].process
        if process is not None and process.state == "stopped":
            return True
        return self._ignored_signal(number) or self._is_reported_stopped(number)

    def _ignored_signal(self, number: int) -> bool:
        """Return whether a rank ignored the signal that ended the others, as if it was stopped.

        If the others reached a deadline, their errors state whether it was stopped.
        """
        status = self.exits[number]
        if self.first_failure is not None or status.reason != "launcher" or status.code != -9:
            return False
        others = [other for other in self.exits.values() if other.is_external]
        if not self.ranks[number].opened:
            # It cannot record an interruption, and an interpreter takes some time to exit.
            others = [other for other in others if other.reason != "interrupted"]
        return any(other.reason == "interrupted" or other.code != -9 for other in others)

    def _is_reported_stopped(self, number: int) -> bool:
        """Return whether the error of another rank states that this rank was stopped."""
        return any(
            self.get_global_rank(get_group(failure.rank, failure.operation), int(place)) == number
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
        notified = [rank for rank in self.ranks.values() if get_phalanx_error(rank)]
        return next((rank.exception for rank in (*first, *notified) if rank.exception), "")

    # The moment.

    def _find_failures(self) -> dict[int, FailedOperation]:
        failures = {}
        for number, rank in self.ranks.items():
            failed = [
                o
                for o in rank.history
                if o.outcome != "ok" and o.end and not _is_cut_by_own_exit(rank, o)
            ]
            last = max(
                failed, key=lambda operation: (operation.end, operation.number), default=None
            )
            if last is None:
                continue
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
        ended = [
            status.time for status in self.exits.values() if status.is_external and status.time
        ]
        if ended and failure.operation.end < min(ended) - _SLACK:
            return False  # long before any rank was ended
        if failure.outcome == "aborted":
            return self._is_aborted_from_outside(failure)
        members = self.get_group_ranks(get_group(failure.rank, failure.operation)).values()
        exits = {n: self.exits[n] for n in members if n in self.exits and n != failure.rank.rank}
        own = [status for number, status in exits.items() if number not in self.failures]
        lost = any(
            status.is_own_failure or status.reason in ("completed", "left") for status in own
        )
        return not lost and any(status.is_external for status in exits.values())

    def _is_aborted_from_outside(self, failure: FailedOperation) -> bool:
        """Return whether a group was aborted because one of its ranks was ended from outside."""
        group = get_group(failure.rank, failure.operation)
        ended = [number for number, status in self.exits.items() if status.is_external]
        known = (
            [self.find_group_record(number, group) for number in ended] if group is not None else []
        )
        return any(
            own is not None and own.abort_reason.startswith(RANK_EXIT_PREFIXES) for own in known
        )

    def _find_moment(self) -> int:
        if self.first_failure is not None:
            return self.first_failure.operation.end
        if self.is_running:
            return self.job.now
        exits = [status for status in self.exits.values() if status.time and status.is_own_failure]
        exits = exits or [
            status for status in self.exits.values() if status.time and status.is_external
        ]
        # Operations that were cut short by this were under way until then.
        cut = [failure.operation.end for failure in self.failures.values()]
        signs = [get_last_record_time(rank) for rank in self.job.ranks]
        return min(
            [*cut, *(status.time for status in exits)], default=max(signs, default=self.job.now)
        )

    # The graph.

    def _count_collectives(self) -> dict[tuple[int, int], int]:
        counts: dict[tuple[int, int], int] = {}
        for number, rank in self.ranks.items():
            for operation in chain(rank.history, rank.open):
                group = get_group(rank, operation)
                if group is None or operation.is_message or operation.begin > self.moment:
                    continue
                key = (number, group.identity)
                counts[key] = max(counts.get(key, 0), operation.sequence)
            for group in rank.groups:  # operations that the history no longer holds
                counts.setdefault((number, group.identity), group.sequence)
        return counts

    def _find_current_operation(self, number: int) -> Operation | None:
        rank = self.ranks[number]
        cut = (o for o in rank.history if o.begin <= self.moment <= o.end)
        candidates = [o for o in chain(rank.open, cut) if o.is_blocking and o.begin <= self.moment]
        if rank.ending == "failed" and rank.ended <= self.moment:
            # The main thread raised, so it was not blocked by operations of other threads.
            candidates = [operation for operation in candidates if not operation.thread]
        return min(candidates, key=lambda o: (o.waiting_for < 0, o.begin, o.number), default=None)

    def _find_wait(self, number: int) -> Wait | None:
        operation = self.current_operation(number)
        if operation is None:
            return None
        any_of = operation.is_message and operation.peer < 0
        peers = tuple(sorted(set(self._peers(number, operation)) - {number}))
        return Wait(number, operation, peers, any_of)

    def _peers(self, number: int, operation: Operation) -> Iterator[int]:
        """Yield the ranks that an operation under way still waits for."""
        group = get_group(self.ranks[number], operation)
        if operation.kind == "join":
            yield from self._absent(group)
        elif operation.is_message and operation.peer < 0:
            yield from self.get_group_ranks(group).values()
        else:
            late = [] if operation.is_message else self._late(group, operation)
            place = operation.peer if operation.is_message else operation.waiting_for
            single = self.get_global_rank(group, place)
            yield from late or (self._unreadable() if single is None else [single])

    def _unreadable(self) -> list[int]:
        return [number for number, rank in self.ranks.items() if rank.problem]

    def _late(self, group: Group | None, operation: Operation) -> list[int]:
        """Return the members of a group that had not reached a collective."""
        return [
            number
            for number in self.get_group_ranks(group).values()
            if group is not None
            and number in self.ranks
            and self.count_collectives(number, group) < operation.sequence
        ]

    def _absent(self, group: Group | None) -> list[int]:
        """Return the ranks that had not begun to join a new group."""
        if group is None:  # the rank's table of groups was full
            return [n for n, rank in self.ranks.items() if not rank.opened and not rank.problem]
        members = group.members or (self.ranks if group.size == len(self.ranks) else ())
        return [n for n in members if n in self.ranks and not self._came(self.ranks[n], group)]

    def _came(self, rank: Rank, group: Group) -> bool:
        """Return whether a rank had begun to join a group by the moment."""
        for operation in chain(rank.history, rank.open):
            own = get_group(rank, operation) if operation.kind == "join" else None
            if own is not None and own.name == group.name and own.size == group.size:
                over = operation.outcome != "ok" and operation.end < self.moment
                if operation.begin <= self.moment and not over:
                    return True
        # Only a formed group has an identity.
        formed = (own for own in rank.groups if own.identity and not own.left)
        return any(own.name == group.name and own.size == group.size for own in formed)


def _has_continued(rank: Rank, failed: Operation) -> bool:
    """Return whether a rank began other operations after one had failed."""
    if get_phalanx_error(rank):
        return False
    good = (o for o in chain(rank.history, rank.open) if o.outcome == "ok")
    return any(operation.begin > failed.end for operation in good)


def _is_cut_by_own_exit(rank: Rank, operation: Operation) -> bool:
    """Return whether an operation was cut short because its own rank was ending or left the group.

    The group's thread may be in an operation when the main thread raises or leaves.
    """
    group = get_group(rank, operation)
    if operation.outcome not in _LOSSES or get_phalanx_error(rank):
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


def _map_group_ranks(job: Job) -> dict[int, dict[int, int]]:
    """Return the ranks of each group by its identity.

    A rank's own record of its number takes precedence over the records of other ranks.
    """
    found: dict[int, dict[int, int]] = {}
    numbers = {rank.rank for rank in job.ranks}
    formed = [(rank, group) for rank in job.ranks for group in rank.groups if group.identity]
    for rank, group in formed:
        found.setdefault(group.identity, {}).setdefault(group.rank, rank.rank)
    for _, group in formed:
        whole = sorted(numbers) if group.size == len(numbers) else ()
        for place, number in enumerate(group.members or whole):
            if number in numbers:
                found[group.identity].setdefault(place, number)
    return found
