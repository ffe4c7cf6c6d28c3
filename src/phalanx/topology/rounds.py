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
from phalanx.topology.rank_record import Place
from phalanx.topology.store_rendezvous import Meeting, key

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["enter_round"]

_ROUND = "phalanx/round"


def enter_round(meeting: Meeting, own: Place) -> Meeting:
    """Claim this process's rank in a round; blocks until rank 0 has begun one.

    Args:
        meeting: The meeting, in the group's store.
        own: The place of this process.

    Returns:
        The meeting, in the store of the round.

    Raises:
        UsageError: Another process has claimed the rank, or rank 0 is in another group.
        CollectiveTimeout: Rank 0 did not begin a round.
    """
    return _begin(meeting, own) if meeting.rank == 0 else _follow(meeting, own)


class _Record(NamedTuple):
    """The record that rank 0 publishes of a round."""

    place: Place
    members: list[int]
    """Ranks in the job by rank in the group; empty for the default group."""

    @classmethod
    def parse(cls, text: str) -> _Record:
        """Return the record that `text` serialized."""
        place, members = json.loads(text)
        return cls(Place.parse(place), members)

    @property
    def text(self) -> str:
        """The record as JSON, as the store holds it."""
        return json.dumps((self.place.text, self.members))

    def inside(self, meeting: Meeting) -> Meeting:
        """Return the meeting in the store of this round."""
        store = PrefixStore(f"phalanx/{self.place.nonce:x}", meeting.store)
        return meeting._replace(store=store)


def _begin(meeting: Meeting, own: Place) -> Meeting:
    """Begin a round by publishing this process's record as the current one."""
    record, current = _Record(own, list(meeting.members)), ""
    while (
        found := meeting.store.compare_set(_ROUND, current, record.text).decode()
    ) != record.text:
        before, current = _Record.parse(found), found
        _check_members(meeting, before)
        _check_holder(meeting, own, before.place)
    inside = record.inside(meeting)
    inside.store.set(key("rank", 0), own.text)
    return inside


def _follow(meeting: Meeting, own: Place) -> Meeting:
    """Claim this process's rank in the first round that the process has not been in."""
    seen = b""
    meeting.joining.waiting_for(0)
    for _ in meeting.tries(lambda: [0]):
        if not meeting.store.check([_ROUND]) or (text := meeting.store.get(_ROUND)) == seen:
            continue
        seen, record = text, _Record.parse(text.decode())
        _check_members(meeting, record)
        inside = record.inside(meeting)
        holder = inside.store.compare_set(key("rank", meeting.rank), "", own.text).decode()
        if holder == own.text:
            return inside
        _check_holder(meeting, own, Place.parse(holder))
    raise AssertionError("tries() ends with an exception")


def _check_holder(meeting: Meeting, own: Place, holder: Place) -> None:
    """Check that the process that has already claimed this rank is this process."""
    if (holder.machine, holder.pid) != (own.machine, own.pid):
        raise UsageError(
            f"rank {meeting.rank} of {meeting.size} is taken already by {holder.process}: "
            "give each process a rank of its own, and each run a store (port or file) of its own"
        )


def _check_members(meeting: Meeting, record: _Record) -> None:
    """Check that rank 0 of the group called `new_group` for the same ranks.

    Each rank numbers groups by its calls of `new_group`, even for groups without it. If ranks call
    it in different orders, different groups get the same number and so the same keys.
    """
    if list(meeting.members) == record.members:
        return
    inside, members = record.inside(meeting), record.members
    came = [each for rank, each in enumerate(members) if inside.store.check([key("rank", rank)])]
    own = meeting.members[meeting.rank]
    raise UsageError(
        f"new_group: rank {own} called it for the ranks {list(meeting.members)} when rank "
        f"{members[0]} ({record.place.process}) called it for the ranks {members}. For {members} "
        f"{_ranks(came)} called it so far, rank {own} did not. All ranks of the job must call "
        "new_group, in the same order, even those that are not in the new group"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
