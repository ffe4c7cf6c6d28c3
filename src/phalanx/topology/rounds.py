"""Rounds of a group: the same processes may form it in one store any number of times.

A store may outlive the group that was formed through it, as the store of torchrun's agent does, and
PyTorch gives each default group the same keys. Whenever rank 0 enters the group, it therefore
begins a round with a random name, and all other keys of the group begin with that name. Ranks need
no common count of rounds: a rank that has been in the current round waits for the next.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # exported at run time

from phalanx.errors import UsageError
from phalanx.topology.rank_record import RankRecord
from phalanx.topology.store_rendezvous import StoreRendezvous, key

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["enter_round"]

_ROUND = "phalanx/round"


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
