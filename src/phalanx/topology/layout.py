"""The ranks of a group by host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

__all__ = ["Layout", "group_by_host"]


@dataclass(frozen=True)
class Layout:
    """The ranks of a group by host, as one of them sees it.

    Attributes:
        rank: This rank, in the group.
        hosts: The ranks of each host in ascending order; the hosts in order of their lowest rank.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def host(self) -> int:
        """The index of this rank's host."""
        return self.host_of(self.rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's host, by local rank."""
        return self.hosts[self.host]

    @cached_property
    def local_rank(self) -> int:
        """The index of this rank among those of its host."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """World size of the group."""
        return sum(map(len, self.hosts))

    @cached_property
    def is_even(self) -> bool:
        """True if all hosts have equally many ranks, so that each local rank has a rail."""
        return len({len(ranks) for ranks in self.hosts}) == 1

    @property
    def rail(self) -> tuple[int, ...]:
        """The ranks with this local rank on all hosts, by host; valid only if hosts are even."""
        return tuple(ranks[self.local_rank] for ranks in self.hosts)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each host."""
        return tuple(ranks[0] for ranks in self.hosts)

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)


def group_by_host(rank: int, opened: Mapping[int, Set[int]]) -> Layout:
    """Return the layout of a group, given the ranks whose memory each rank can open.

    Two ranks share a host if each can open the other's memory. A rank belongs to the first host
    whose lowest rank shares a host with it. All ranks derive the same layout.

    Args:
        rank: The rank whose view the layout is.
        opened: By rank, the ranks whose memory it can open.
    """
    hosts: list[list[int]] = []
    for member in sorted(opened):
        host = next((ranks for ranks in hosts if _is_mutual(member, ranks[0], opened)), None)
        if host is None:
            hosts.append([member])
        else:
            host.append(member)
    return Layout(rank, tuple(map(tuple, hosts)))


def _is_mutual(one: int, other: int, opened: Mapping[int, Set[int]]) -> bool:
    return one in opened[other] and other in opened[one]


def format_rank_ranges(numbers: Sequence[int]) -> str:
    """Format ranks in the given order, with consecutive ranks as ranges: "0-3,6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
