"""Messages by which the ranks of different hosts tell each other that they come to an exchange.

Between two exchanges, a rank has a receive from each other host in progress. It ends when that
host's rank begins its next exchange, with its number of steps, and it fails when that rank is lost
or has left the group. So a rank learns both between two of its steps, and waits for neither.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_TAG = 0x4C53  # other messages of the group would need the same tag; there are none


class Arrivals:
    """The arrivals of ranks of other hosts at the next exchange.

    Args:
        group: The group of all ranks, which no one else uses.
        hosts: The ranks in the group of each host.
    """

    def __init__(self, group: dist.ProcessGroup, hosts: list[list[int]]) -> None:
        self._group = group
        own_rank = dist.get_rank(group)
        own = next(ranks for ranks in hosts if own_rank in ranks)
        others = [ranks for ranks in hosts if ranks is not own]
        index = own.index(own_rank)
        self._sources = [ranks[index % len(ranks)] for ranks in others]
        """A rank of each other host, which tells this one that it has begun an exchange."""
        self._listeners = [
            rank
            for ranks in others
            for position, rank in enumerate(ranks)
            if position % len(own) == index
        ]
        self._received = torch.zeros(len(self._sources), dtype=torch.int64, device="cpu")
        self._receives: list[Any] = []
        self._sends: list[Any] = []

    def listen(self) -> None:
        """Begin to receive; those of the exchange before have ended."""
        ended = [each for each in self._sends if each.is_completed()]
        self._complete(ended)
        self._sends = [each for each in self._sends if each not in ended]
        self._complete(self._receives)
        self._receives = [
            dist.irecv(
                self._received[number : number + 1], group=self._group, group_src=source, tag=_TAG
            )
            for number, source in enumerate(self._sources)
        ]

    def announce(self, completed: int) -> None:
        """Tell the others that this rank begins an exchange, after this number of steps."""
        message = torch.tensor([completed], device="cpu")
        self._sends += [
            dist.isend(message, group=self._group, group_dst=listener, tag=_TAG)
            for listener in self._listeners
        ]

    def find(self) -> int | None:
        """Return the largest number of steps of a host that has begun the exchange, or None.

        Does not wait.

        Raises:
            PhalanxError: A rank is lost, or has left the group.
        """
        ended = [index for index, each in enumerate(self._receives) if each.is_completed()]
        self._complete([self._receives[index] for index in ended])
        return int(self._received[ended].max()) if ended else None

    @staticmethod
    def _complete(works: list[Any]) -> None:
        for work in works:
            work.wait()
