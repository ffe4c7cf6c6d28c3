"""How many cores this process may use, and how to share them among ranks."""

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["threads_per_rank", "usable_cores"]


def usable_cores(root: str | Path = "/") -> int:
    """Count the cores that this process may keep busy: at least 1.

    The affinity mask counts, and the CPU quota of the control group (version 1 or 2) or of one
    above it: a container given 2 cores of 64 has 2. Part of a core doesn't count.

    Args:
        root: where `/proc` and `/sys` are, for tests.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota(Path(root))
    return cores if quota is None else max(1, min(cores, int(quota)))


def threads_per_rank(nprocs: int) -> int:
    """Threads that each of `nprocs` ranks can have without fighting for cores: at least 1."""
    return max(1, usable_cores() // nprocs)


def _quota(root: Path) -> float | None:
    """The least CPU quota of this process's control groups, in cores; None if there is none."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no control groups on this machine
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            quotas += _climb(root / "sys/fs/cgroup", path, _version2)
        elif "cpu" in controllers.split(","):
            quotas += _climb(root / "sys/fs/cgroup" / controllers, path, _version1)
            quotas += _climb(root / "sys/fs/cgroup/cpu", path, _version1)
    return min(quotas, default=None)


def _climb(mount: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    group = mount / path.lstrip("/")
    found = []
    for folder in (group, *group.parents):
        try:
            quota = read(folder)
        except (OSError, ValueError):  # inside a container, the path can be the host's
            quota = None
        if quota is not None:
            found.append(quota)
        if folder == mount:
            break
    return found


def _version2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _version1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
