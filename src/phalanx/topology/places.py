"""The places of ranks in a machine, and the tree over which the ranks of a host meet.

A place is a socket, a NUMA node and a last-level cache, each by the lowest core that it has. The
tree joins the ranks that share a cache first, then the caches of a node, the nodes of a socket, and
the sockets, so that few cache lines cross them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_RANKS = 32
"""Smaller groups are flat: every rank looks at all others, one hop instead of several."""

SYSFS = Path("/sys/devices/system")


def own_place(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Return the socket, the NUMA node and the last-level cache of this process.

    Each is represented by its lowest core. The result is empty if the process may use cores of
    several caches, or if the kernel doesn't say which cores share one.
    """
    places = {_place_of(core, sysfs) for core in os.sched_getaffinity(0)}
    return places.pop() if len(places) == 1 else ()


def _place_of(core: int, sysfs: Path) -> tuple[int, ...]:
    folder = sysfs / "cpu" / f"cpu{core}"
    try:
        caches = {
            int((index / "level").read_text()): index for index in folder.glob("cache/index*")
        }
        nodes = [_lowest(node.resolve() / "cpulist") for node in folder.glob("node[0-9]*")]
        socket = _lowest(folder / "topology" / "package_cpus_list")
        return (
            socket,
            nodes[0] if nodes else socket,
            _lowest(caches[max(caches)] / "shared_cpu_list"),
        )
    except (OSError, ValueError):
        return ()


def _lowest(path: Path) -> int:
    """Return the first core of a list such as "0-7,64-71"."""
    return int(path.read_text().split("-")[0].split(",")[0])


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
    return [_parent(rank, paths) for rank in range(len(paths))]


def _parent(rank: int, paths: Sequence[tuple[int, ...]]) -> int:
    """Return the first rank of the smallest part of the machine in which `rank` isn't the first."""
    own = paths[rank]
    for depth in range(len(own), -1, -1):
        first = next(other for other, path in enumerate(paths) if path[:depth] == own[:depth])
        if first != rank:
            return first
    return -1
