"""Who waits for whom: the ranks of a job at one moment, as a graph.

That moment is now while nothing has failed, else the one at which trouble first showed: what
follows from it (peers that are told, ranks that the launcher stops) must not hide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from phalanx.observe.culprit.endings import End, end_of, last_sign, told_of
from phalanx.observe.last_words import SESSION_ENDED

if TYPE_CHECKING:
    from phalanx.observe.model import Group, Job, Operation, Rank

__all__ = ["BY_ITSELF", "Scene", "Trouble", "Wait", "group_of"]

BY_ITSELF = (SESSION_ENDED, "it left while an operation")
"""How reasons begin that Phalanx gives when it aborts a group because its rank ends."""

_SLACK = 2_000_000_000
"""Nanoseconds by which a launcher may notice the end of a rank later than its peers."""

_FOLLOWS = ("peer_lost", "left", "aborted", "interrupted")
"""Outcomes that ranks which are stopped from outside bring about on the others."""


@dataclass(frozen=True)
class Trouble:
    """An operation that failed, and the rank whose it is."""

    rank: Rank
    operation: Operation

    @property
    def outcome(self) -> str:
        """What went wrong, as the operation says it."""
        return self.operation.outcome


@dataclass(frozen=True)
class Wait:
    """A rank that can't go on with an operation.

    Attributes:
        rank: The one that waits.
        operation: The operation that it waits in.
        peers: Whom it waits for, all of them or (`any_of`) one; empty if that isn't known.
        any_of: Whether one of them is enough.
    """

    rank: int
    operation: Operation
    peers: tuple[int, ...]
    any_of: bool = False


class Scene:
    """A job at the moment that explains it. Ranks are numbers in the job everywhere.

    Attributes:
        job: The job.
        ranks: Its ranks by their number.
        ends: How each ended, or that it didn't.
        recovered: Whether some rank has gone on after an operation of its failed.
        troubles: The operation that failed on each rank and that it didn't recover from.
        trouble: The first of them; None if nothing failed but what was stopped from outside.
        moment: The moment, in nanoseconds of the monotonic clock.
        waits: The waits at that moment, by the rank that waits.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ranks = {rank.rank: rank for rank in job.ranks}
        self.ends: dict[int, End] = {rank.rank: end_of(rank, job) for rank in job.ranks}
        self._members = _members(job)
        self.recovered = False
        self.troubles = self._find_troubles()
        self.trouble = self._first_trouble()
        self.moment = self._find_moment()
        self._reached = self._find_reached()
        self._under_way = {number: self._find_under_way(number) for number in self.ranks}
        self.waits: dict[int, Wait] = {
            number: wait for number in self.ranks if (wait := self._find_wait(number)) is not None
        }

    @property
    def runs(self) -> bool:
        """Whether any process of the job may be there: those on other machines can't be seen."""
        return self.job.running or any(end.how == "elsewhere" for end in self.ends.values())

    @property
    def live(self) -> bool:
        """Whether the moment is now."""
        return self.runs and self.trouble is None

    # What ranks do.

    def under_way(self, number: int) -> Operation | None:
        """The operation that a rank was in at the moment; None if it was in code of its own."""
        return self._under_way.get(number)

    def before(self, number: int) -> Operation | None:
        """The operation that a rank had ended last before the moment."""
        ended = [o for o in self.ranks[number].history if o.end and o.end < self.moment]
        return max(ended, key=lambda operation: operation.end, default=None)

    def members(self, group: Group | None) -> dict[int, int]:
        """The ranks of a group by their number in it, as far as they are known."""
        return {} if group is None else self._members.get(group.identity, {})

    def member(self, group: Group | None, place: int) -> int | None:
        """The rank that has a number in a group."""
        return self.members(group).get(place)

    def reached(self, number: int, group: Group) -> int:
        """How many collectives of a group a rank had begun by the moment."""
        return self._reached.get((number, group.identity), 0)

    def waiting_for(self, culprits: Iterable[int]) -> list[int]:
        """Ranks that wait for some of these, or for ranks that do."""
        found = set(culprits)
        given = set(found)
        grown = True
        while grown:
            more = {n for n, wait in self.waits.items() if n not in found and found & {*wait.peers}}
            found |= more
            grown = bool(more)
        return sorted(found - given)

    def in_group(self, number: int, group: Group) -> Group | None:
        """A group as another of its ranks knows it."""
        groups = self.ranks[number].groups if number in self.ranks else ()
        alike = (known for known in groups if known.identity == group.identity != 0)
        return next(alike, None)

    def gone(self, number: int) -> bool:
        """Whether a rank had ended by the moment, or left its groups, by its own doing."""
        end = self.ends[number]
        if not end.by_itself and end.how not in ("well", "left"):
            return False
        if number in self.troubles or told_of(self.ranks[number]):
            return False  # it was there to be told
        if self.trouble is not None and self.trouble.outcome in ("timeout", "ring"):
            # Who is waited for in vain is alive.
            return 0 < end.time <= self.moment
        return end.time <= self.moment + _SLACK

    def has_left(self, number: int, group: Group) -> bool:
        """Whether a rank has left a group."""
        known = self.in_group(number, group)
        return known is not None and known.left

    def joining(self, number: int) -> bool:
        """Whether a rank was waiting for the others of a new group at the moment."""
        operation = self.under_way(number)
        return operation is not None and operation.kind == "join"

    # The moment.

    def _find_troubles(self) -> dict[int, Trouble]:
        troubles = {}
        for number, rank in self.ranks.items():
            failed = [o for o in rank.history if o.outcome != "ok" and o.end]
            last = max(
                failed, key=lambda operation: (operation.end, operation.number), default=None
            )
            if last is None:
                continue
            if _went_on(rank, last):
                self.recovered = True
            else:
                troubles[number] = Trouble(rank, _first_of_streak(rank, failed))
        return troubles

    def _first_trouble(self) -> Trouble | None:
        own = [trouble for trouble in self.troubles.values() if not self._from_outside(trouble)]
        return min(own, key=lambda t: (t.operation.end, t.rank.rank), default=None)

    def _from_outside(self, trouble: Trouble) -> bool:
        if trouble.outcome not in _FOLLOWS:
            return False
        if trouble.outcome == "interrupted":
            return self.ends[trouble.rank.rank].by_others
        ended = [end.time for end in self.ends.values() if end.by_others and end.time]
        if ended and trouble.operation.end < min(ended) - _SLACK:
            return False  # long before anybody was ended
        if trouble.outcome == "aborted":
            return self._aborted_from_outside(trouble)
        members = self.members(group_of(trouble.rank, trouble.operation)).values()
        ends = {n: self.ends[n] for n in members if n in self.ends and n != trouble.rank.rank}
        own = [end for number, end in ends.items() if number not in self.troubles]
        lost = any(end.by_itself or end.how in ("well", "left") for end in own)
        return not lost and any(end.by_others for end in ends.values())

    def _aborted_from_outside(self, trouble: Trouble) -> bool:
        """Whether a group was aborted because somebody ended a rank that was in it."""
        group = group_of(trouble.rank, trouble.operation)
        ended = [number for number, end in self.ends.items() if end.by_others]
        known = [self.in_group(number, group) for number in ended] if group is not None else []
        return any(own is not None and own.why.startswith(BY_ITSELF) for own in known)

    def _find_moment(self) -> int:
        if self.trouble is not None:
            return self.trouble.operation.end
        if self.runs:
            return self.job.now
        ends = [end for end in self.ends.values() if end.time and end.by_itself]
        ends = ends or [end for end in self.ends.values() if end.time and end.by_others]
        # What was cut short by that was under way until then.
        cut = [trouble.operation.end for trouble in self.troubles.values()]
        signs = [last_sign(rank) for rank in self.job.ranks]
        return min([*cut, *(end.time for end in ends)], default=max(signs, default=self.job.now))

    # The graph.

    def _find_reached(self) -> dict[tuple[int, int], int]:
        reached: dict[tuple[int, int], int] = {}
        for number, rank in self.ranks.items():
            for operation in chain(rank.history, rank.open):
                group = group_of(rank, operation)
                if group is None or operation.is_message or operation.begin > self.moment:
                    continue
                key = (number, group.identity)
                reached[key] = max(reached.get(key, 0), operation.sequence)
            for group in rank.groups:  # what the history doesn't hold any more
                reached.setdefault((number, group.identity), group.sequence)
        return reached

    def _find_under_way(self, number: int) -> Operation | None:
        rank = self.ranks[number]
        cut = (o for o in rank.history if o.begin <= self.moment <= o.end)
        candidates = [o for o in chain(rank.open, cut) if _blocks(o) and o.begin <= self.moment]
        return min(candidates, key=lambda o: (o.waiting_for < 0, o.begin, o.number), default=None)

    def _find_wait(self, number: int) -> Wait | None:
        operation = self.under_way(number)
        if operation is None:
            return None
        any_of = operation.is_message and operation.peer < 0
        peers = tuple(sorted(set(self._peers(number, operation)) - {number}))
        return Wait(number, operation, peers, any_of)

    def _peers(self, number: int, operation: Operation) -> Iterator[int]:
        """Whom an operation under way needs and doesn't have."""
        group = group_of(self.ranks[number], operation)
        if operation.kind == "join":
            yield from self._absent(group)
        elif operation.is_message and operation.peer < 0:
            yield from self.members(group).values()
        else:
            late = [] if operation.is_message else self._late(group, operation)
            place = operation.peer if operation.is_message else operation.waiting_for
            single = self.member(group, place)
            yield from late or (self._unreadable() if single is None else [single])

    def _unreadable(self) -> list[int]:
        return [number for number, rank in self.ranks.items() if rank.problem]

    def _late(self, group: Group | None, operation: Operation) -> list[int]:
        """Members of the group that had not come to a collective."""
        return [
            number
            for number in self.members(group).values()
            if group is not None
            and number in self.ranks
            and self.reached(number, group) < operation.sequence
        ]

    def _absent(self, group: Group | None) -> list[int]:
        """Ranks that had not come to where a new group is formed."""
        if group is None:  # its rank has formed too many to note this one
            return [n for n, rank in self.ranks.items() if not rank.opened and not rank.problem]
        members = group.members or (self.ranks if group.size == len(self.ranks) else ())
        return [n for n in members if n in self.ranks and not self._came(self.ranks[n], group)]

    def _came(self, rank: Rank, group: Group) -> bool:
        """Whether a rank had begun to form a group by the moment."""
        for operation in chain(rank.history, rank.open):
            own = group_of(rank, operation) if operation.kind == "join" else None
            if own is not None and own.name == group.name and own.size == group.size:
                over = operation.outcome != "ok" and operation.end < self.moment
                if operation.begin <= self.moment and not over:
                    return True
        # What is formed has an identity.
        formed = (own for own in rank.groups if own.identity and not own.left)
        return any(own.name == group.name and own.size == group.size for own in formed)


def group_of(rank: Rank, operation: Operation) -> Group | None:
    """The group of an operation, as its rank knows it."""
    known = 0 <= operation.group < len(rank.groups)
    return rank.groups[operation.group] if known else None


def _blocks(operation: Operation) -> bool:
    """Whether a rank that is in it waits: a message may be posted long before it is waited for."""
    return not operation.is_message or operation.waiting_for >= 0 or operation.peer < 0


def _went_on(rank: Rank, failed: Operation) -> bool:
    """Whether a rank did other operations after one that failed."""
    if told_of(rank):
        return False
    good = (o for o in chain(rank.history, rank.open) if o.outcome == "ok")
    return any(operation.begin > failed.end for operation in good)


def _first_of_streak(rank: Rank, failed: list[Operation]) -> Operation:
    """The operation with which a rank's last trouble began."""
    last = max(operation.end for operation in failed)
    good = (o.begin for o in rank.history if o.outcome == "ok" and o.begin <= last)
    since = max(good, default=0)
    streak = [operation for operation in failed if operation.end > since] or failed
    return min(streak, key=lambda operation: (operation.end, operation.number))


def _members(job: Job) -> dict[int, dict[int, int]]:
    """The ranks of each group by its identity: as they say themselves, else as others noted."""
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
