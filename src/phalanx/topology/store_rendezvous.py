"""Waiting for the other ranks in the store while a group is formed, and the rounds of a group.

The same processes may form a group in one store any number of times. A store may outlive the group
that was formed through it, as the store of torchrun's agent does, and PyTorch gives each default
group the same keys. Whenever rank 0 enters the group, it therefore begins a round with a random
name, and all other keys of the group begin with that name. Ranks need no common count of rounds: a
rank that has been in the current round waits for the next.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

from phalanx.errors import CollectiveTimeout, PhalanxError, UsageError
from phalanx.system.polling import attempts
from phalanx.topology.layout import RankRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

    from phalanx import _native

_MAX_DESCRIBED = 8
"""The maximum number of missing ranks that an error describes."""
_ROUND = "phalanx/round"


class StoreRendezvous(NamedTuple):
    """A rank's part in the formation of a group.

    Attributes:
        store: The store of the group, or of a round of it.
        rank: This rank in the group.
        world_size: World size of the group.
        start: The time at which this rank arrived, in monotonic seconds.
        timeout: The time that this rank waits for the others, in seconds.
        formation: The entry in the flight recorder for the formation of the group.
        describe_missing: Returns a description of a missing rank; see `join`.
        members: Ranks in the job by rank in the group; empty for the default group.
        check: A function that is called during all waits, and may raise to end them.
    """

    store: Store
    rank: int
    world_size: int
    start: float
    timeout: float
    formation: _native.GroupFormation
    describe_missing: Callable[[int, str], str] | None
    members: Sequence[int] = ()
    check: Callable[[], None] | None = None

    def wait_for_values(self, name: str) -> list[str]:
        """Return the values that all ranks publish under a name, by rank; blocks until they have.

        Raises:
            CollectiveTimeout: A rank did not publish a value before the deadline.
            PhalanxError: Another rank cannot join.
        """
        keys = [key(name, rank) for rank in range(self.world_size)]
        first = 0
        for _ in self.poll(lambda: self._missing(keys)):
            first = self._first_missing(keys, first)
            if first == self.world_size:
                break
            self.formation.waiting_for(first)
            self.raise_reported_failure()
        return [value.decode() for value in get_values(self.store, keys)]

    def wait_for_value(self, name: str, rank: int) -> str:
        """Return the value that a rank publishes under a name; see `wait_for_values`."""
        self.formation.waiting_for(rank)
        for _ in self.poll(lambda: [rank]):
            self.raise_reported_failure()
            if self.store.check([key(name, rank)]):
                break
        value: bytes = self.store.get(key(name, rank))
        return value.decode()

    def poll(self, missing: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Yield once per attempt until the deadline, then raise `CollectiveTimeout`.

        Args:
            missing: Returns the ranks that have not arrived, for the message.
        """
        for _ in attempts(self.start + self.timeout):
            if self.check is not None:
                self.check()
            yield
        absent = missing()
        names = _format_ranks(absent)
        raise CollectiveTimeout(
            f"[rank {self.rank}/{self.world_size} on {socket.gethostname()}] joining the group: "
            f"{names} did not arrive within {self.timeout:g} s of this rank's arrival"
            f"{self._descriptions(absent)}{self._advice(absent)}",
            ranks=[self.members[rank] if self.members else rank for rank in absent],
            seconds=self.timeout,
        )

    def report_failure(self, reason: str) -> PhalanxError:
        """Report to the other ranks that this rank cannot join; return the error to raise."""
        # Recorded first: of all failures in the recorders, the first is taken for the root cause.
        self.formation.end("system")
        message = f"rank {self.rank} could not join: {reason}"
        self.store.set("phalanx/failed", message)
        text = f"[rank {self.rank}/{self.world_size}] {message.partition(' ')[2]}"
        return PhalanxError(text, ranks=[self._in_job(self.rank)])

    def raise_reported_failure(self) -> None:
        """Raise `PhalanxError` if another rank cannot join."""
        if self.store.check(["phalanx/failed"]):
            reason = self.store.get("phalanx/failed").decode()
            reporter = self._in_job(int(reason.split()[1]))
            raise PhalanxError(f"[rank {self.rank}/{self.world_size}] {reason}", ranks=[reporter])

    def _in_job(self, rank: int) -> int:
        return self.members[rank] if self.members else rank

    def _first_missing(self, keys: list[str], first: int) -> int:
        """Return the index of the first missing key from `first` on, or `len(keys)` if all exist.

        Takes about log2(len(keys)) queries, of growing and then shrinking ranges of keys. With one
        query per key, the ranks would send world size squared queries to one process.
        """
        step = 1
        while first < len(keys) and self.store.check(keys[first : first + step]):
            first = min(first + step, len(keys))
            step *= 2
        while first < len(keys) and step > 1:
            step //= 2
            if self.store.check(keys[first : first + step]):
                first = min(first + step, len(keys))
        return first

    def _missing(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, each in enumerate(keys) if not self.store.check([each])]

    def _advice(self, absent: Sequence[int]) -> str:
        if not self.members:
            return ": are all processes started, with the same world size and address?"
        entered = [rank == self.rank or self._holder(rank) != "" for rank in range(self.world_size)]
        callers = [each for each, is_caller in zip(self.members, entered, strict=True) if is_caller]
        others = [self.members[rank] for rank in absent if not entered[rank]]
        if not others:
            return ""
        return (
            f": new_group for the ranks {list(self.members)} of the job was called by {callers}, "
            f"but not by {others}. All ranks of the job must call it, in the same order, even "
            "those that are not in the new group"
        )

    def _descriptions(self, ranks: Sequence[int]) -> str:
        """Return descriptions of missing ranks."""
        if self.describe_missing is None:
            return ""
        known = [
            (rank, self.describe_missing(rank, self._holder(rank)))
            for rank in ranks[:_MAX_DESCRIBED]
        ]
        return "".join(f"; rank {rank} {description}" for rank, description in known if description)

    def _holder(self, rank: int) -> str:
        with contextlib.suppress(DistError):  # the host of the store may have exited
            if self.store.check([key("rank", rank)]):
                return RankRecord.parse(self.store.get(key("rank", rank)).decode()).process
        return ""


def get_values(store: Store, keys: list[str]) -> list[bytes]:
    """Return the values of keys, by one request if the store has such."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        values: list[bytes] = store.multi_get(keys)
        return values
    return [store.get(each) for each in keys]


def key(name: str, rank: int) -> str:
    """Return the key in the store under which a rank publishes a value."""
    return f"phalanx/{name}/{rank}"


def enter_round(rendezvous: StoreRendezvous, own_record: RankRecord) -> StoreRendezvous:
    """Claim this process's rank in a round; blocks until rank 0 has begun one.

    Args:
        rendezvous: The rendezvous, in the group's store.
        own_record: The record of this process.

    Returns:
        The rendezvous, in the store of the round.

    Raises:
        UsageError: Another process has claimed the rank, or rank 0 is in another group.
        CollectiveTimeout: Rank 0 did not begin a round.
    """
    return (
        _begin_round(rendezvous, own_record)
        if rendezvous.rank == 0
        else _claim_rank(rendezvous, own_record)
    )


class _RoundRecord(NamedTuple):
    """The record that rank 0 publishes of a round."""

    rank_0: RankRecord
    members: list[int]
    """Ranks in the job by rank in the group; empty for the default group."""

    @classmethod
    def parse(cls, text: str) -> _RoundRecord:
        """Parse the JSON that `text` returned."""
        rank_0, members = json.loads(text)
        return cls(RankRecord.parse(rank_0), members)

    @property
    def text(self) -> str:
        """The record as JSON, as it is in the store."""
        return json.dumps((self.rank_0.text, self.members))

    def scope(self, rendezvous: StoreRendezvous) -> StoreRendezvous:
        """Return the rendezvous in the store of this round."""
        store = PrefixStore(f"phalanx/{self.rank_0.nonce:x}", rendezvous.store)
        return rendezvous._replace(store=store)


def _begin_round(rendezvous: StoreRendezvous, own_record: RankRecord) -> StoreRendezvous:
    """Begin a round by publishing this process's record as the current one."""
    record, current = _RoundRecord(own_record, list(rendezvous.members)), ""
    while (
        stored := rendezvous.store.compare_set(_ROUND, current, record.text).decode()
    ) != record.text:
        previous, current = _RoundRecord.parse(stored), stored
        _check_members(rendezvous, previous)
        _check_holder(rendezvous, own_record, previous.rank_0)
    scoped = record.scope(rendezvous)
    scoped.store.set(key("rank", 0), own_record.text)
    return scoped


def _claim_rank(rendezvous: StoreRendezvous, own_record: RankRecord) -> StoreRendezvous:
    """Claim this process's rank in the first round that the process has not been in."""
    last_text = b""
    rendezvous.formation.waiting_for(0)
    for _ in rendezvous.poll(lambda: [0]):
        if (
            not rendezvous.store.check([_ROUND])
            or (text := rendezvous.store.get(_ROUND)) == last_text
        ):
            continue
        last_text, record = text, _RoundRecord.parse(text.decode())
        _check_members(rendezvous, record)
        scoped = record.scope(rendezvous)
        holder = scoped.store.compare_set(
            key("rank", rendezvous.rank), "", own_record.text
        ).decode()
        if holder == own_record.text:
            return scoped
        _check_holder(rendezvous, own_record, RankRecord.parse(holder))
    raise AssertionError("poll() ends with an exception")


def _check_holder(rendezvous: StoreRendezvous, own_record: RankRecord, holder: RankRecord) -> None:
    """Check that the process that has already claimed this rank is this process."""
    if (holder.machine, holder.pid) != (own_record.machine, own_record.pid):
        raise UsageError(
            f"rank {rendezvous.rank} of {rendezvous.world_size} is already taken by "
            f"{holder.process}: give each process a rank of its own, and each run a store (port or "
            "file) of its own"
        )


def _check_members(rendezvous: StoreRendezvous, record: _RoundRecord) -> None:
    """Check that rank 0 of the group called `new_group` for the same ranks.

    Each rank numbers groups by its calls of `new_group`, even for groups without it. If ranks call
    it in different orders, different groups get the same number and so the same keys.
    """
    if list(rendezvous.members) == record.members:
        return
    scoped, members = record.scope(rendezvous), record.members
    arrived = [each for rank, each in enumerate(members) if scoped.store.check([key("rank", rank)])]
    own_rank = rendezvous.members[rendezvous.rank]
    raise UsageError(
        f"new_group: rank {own_rank} called it for the ranks {list(rendezvous.members)} when rank "
        f"{members[0]} ({record.rank_0.process}) called it for the ranks {members}. For {members} "
        f"{_format_ranks(arrived)} called it so far, rank {own_rank} did not. All ranks of the job "
        "must call new_group, in the same order, even those that are not in the new group"
    )


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
