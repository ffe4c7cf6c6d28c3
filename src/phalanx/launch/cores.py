"""How many cores this process may use, and how to share them among ranks."""

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["limits", "threads_per_rank", "usable_cores"]


def usable_cores(root: str | Path = "/") -> int:
    """Count the cores that this process may keep busy: at least 1.

    The affinity mask counts, and the CPU quota of the control group (version 1 or 2) or of one
    above it: a container given 2 cores of 64 has 2. Part of a core doesn't count.

    Args:
        root: where `/proc` and `/sys` are, for tests.
    """
    cores = len(os.sched_getaffinity(0))
    quota = min(limits("cpu", _version2, _version1, root), default=cores)
    return max(1, min(cores, int(quota)))


def threads_per_rank(nprocs: int) -> int:
    """Threads that each of `nprocs` ranks can have without fighting for cores: at least 1."""
    return max(1, usable_cores() // nprocs)


def limits(
    controller: str,
    version2: Callable[[Path], float | None],
    version1: Callable[[Path], float | None],
    root: str | Path = "/",
) -> list[float]:
    """What limits the control groups of this process, and those above them, set.

    Args:
        controller: "cpu" or "memory".
        version2: reads the limit of a control group's folder, version 2; None: it sets none.
        version1: the same for version 1.
        root: where `/proc` and `/sys` are, for tests.
    """
    root = Path(root)
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no control groups on this machine
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _climb(root / "sys/fs/cgroup", path, version2)
        elif controller in controllers.split(","):
            for mount in {controllers, controller}:
                found += _climb(root / "sys/fs/cgroup" / mount, path, version1)
    return found


def _climb(mount: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    group = mount / path.lstrip("/")
    found = []
    for folder in (group, *group.parents):
        try:
            limit = read(folder)
        except (OSError, ValueError):  # inside a container, the path can be the host's
            limit = None
        if limit is not None:
            found.append(limit)
        if folder == mount:
            break
    return found


def _version2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _version1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
