"""The places of ranks in a machine, and the tree over which the ranks of a host meet.

A place is a socket, a NUMA node and a last-level cache, each by the lowest core that it has. The
tree joins the ranks that share a cache first, then the caches of a node, the nodes of a socket, and
the sockets, so that few cache lines cross them. Large data are reduced over the chain of caches.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIN_RANKS = 32
"""Smaller groups are flat: every rank looks at all others, one hop instead of several."""

SYSFS = Path("/sys/devices/system")


def own_place(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Return the socket, the NUMA node and the last-level cache of this process.

    Each is represented by its lowest core. The result is empty if the process may use cores of
    several caches, or if the kernel doesn't say which cores share one.
    """
    own = os.sched_getaffinity(0)
    folder = sysfs / "cpu" / f"cpu{min(own)}"
    try:
        levels = {
            int((index / "level").read_text()): index for index in folder.glob("cache/index*")
        }
        cache = _cores(levels[max(levels)] / "shared_cpu_list")
        socket = _cores(folder / "topology" / "package_cpus_list")
        nodes = [_cores(node / "cpulist") for node in folder.glob("node[0-9]*")]
    except (OSError, ValueError):
        return ()
    node = nodes[0] if nodes else socket
    return (min(socket), min(node), min(cache)) if own <= cache else ()


def _cores(path: Path) -> set[int]:
    """Return the cores of a list such as "0-7,64-71"."""
    ranges = [each.split("-") for each in path.read_text().split(",")]
    return {core for each in ranges for core in range(int(each[0]), int(each[-1]) + 1)}


def meeting_tree(places: Sequence[Sequence[int]]) -> list[int]:
    """Return the parent of each rank in the tree: a lower rank, and -1 for rank 0.

    The result is empty if the group should be flat: if it has fewer than `MIN_RANKS` ranks, the
    place of one is unknown, or all share a cache.

    Args:
        places: The place of each rank, as of `own_place`.
    """
    paths = [tuple(place) for place in places]
    if len(paths) < MIN_RANKS or len(set(paths)) == 1 or not all(paths):
        return []
    first: dict[tuple[int, ...], int] = {}  # the first rank of each part of the machine
    for rank, path in enumerate(paths):
        for depth in range(len(path) + 1):
            first.setdefault(path[:depth], rank)
    return [_parent(rank, path, first) for rank, path in enumerate(paths)]


def cache_chain(places: Sequence[Sequence[int]]) -> list[int]:
    """Return the first rank of each cache, in the order of ranks.

    The result is empty if the ranks of some cache do not follow each other, since a reduction in
    the order of ranks then enters that cache more than once; or if there are fewer than two ranks
    per cache on average, which have nothing to combine before their data leave the cache.

    Args:
        places: The place of each rank, as of `own_place`.
    """
    paths = [tuple(place) for place in places]
    first_ranks = [rank for rank, path in enumerate(paths) if rank == 0 or path != paths[rank - 1]]
    returns = len(first_ranks) > len(set(paths))
    return [] if returns or len(paths) < 2 * len(first_ranks) else first_ranks


def _parent(rank: int, path: tuple[int, ...], first: Mapping[tuple[int, ...], int]) -> int:
    """Return the first rank of the smallest part of the machine in which `rank` isn't the first."""
    parts = (path[:depth] for depth in range(len(path), -1, -1))
    return next((first[part] for part in parts if first[part] != rank), -1)
