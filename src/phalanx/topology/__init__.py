"""The assignment of ranks to hosts, and the setup of the segment that the ranks of a host share.

`join` forms a group. It takes the group's store and returns the `Layout` of the group,
which lists the ranks of each host, and the native group of this rank's host. Two ranks prove that
they share a host: each opens a piece of the other's memory and finds a nonce in it. Ranks of other
hosts reach this rank at `own_address`. On machines with several caches, the ranks of a large group
meet over a tree (`places`). After a failure, the ranks of a group reach an `Agreement` on the
members of the next group.
"""

from phalanx.topology.agreement import Agreement, Board, StoreBoard, Survivors
from phalanx.topology.group_formation import SegmentOfRound, join
from phalanx.topology.layout import HostLink, Layout, RankRecord, own_address

__all__ = [
    "Agreement",
    "Board",
    "HostLink",
    "Layout",
    "RankRecord",
    "SegmentOfRound",
    "StoreBoard",
    "Survivors",
    "join",
    "own_address",
]
