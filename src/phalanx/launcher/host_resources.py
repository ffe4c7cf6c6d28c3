"""Resources of this host that a launcher requires, or divides among the ranks.

These are /proc, open files, cores and memory. `rank_defaults` gives each rank its share.
"""

import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from phalanx import env
from phalanx.errors import LaunchError, UsageError

_OPEN_FILES = "/proc/self/fd"
# Measured with `phalanx run`, which needs most: 21 files, and 5.3 more per rank.
_FILES, _FILES_PER_RANK = 24, 6
# Set both or none: either alone disables the C library's dynamic threshold and is worse than the
# default.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
}


def usable_cores(root: str | Path = "/") -> int:
    """Return the number of cores that this process may keep busy, at least 1.

    The limits are the affinity mask and the CPU quotas of the control group (version 1 or 2) and
    of its ancestors: a container with 2 of 64 cores has 2. A fraction of a core does not count.

    Args:
        root: The directory that contains `proc` and `sys`; for tests.
    """
    cores = len(os.sched_getaffinity(0))
    quota = min(cgroup_limits("cpu", _read_v2, _read_v1, root), default=cores)
    return max(1, min(cores, int(quota)))


def threads_per_rank(nprocs: int) -> int:
    """Return how many threads each of `nprocs` ranks can use without contention, at least 1."""
    return max(1, usable_cores() // nprocs)


def rank_defaults(nprocs: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment `environ` of each of `nprocs` ranks.

    Ranks share the cores of this host, write their output unbuffered, print a traceback when they
    crash and fold the tracebacks of their exceptions. PyTorch records the last collectives of its
    own backends, which `phalanx explain` reads. Their memory allocator keeps the memory that
    a training step frees. If the kernel instead reclaims and maps it again, page by page, in every
    step, a step of a small network takes up to half longer. On a host without an accelerator,
    Accelerate is told to use the CPU.

    Raises:
        UsageError: `PHALANX_TRACEBACKS` is malformed, which ranks would only notice later.
    """
    try:
        env.tracebacks(environ)
    except ValueError as error:
        raise UsageError(str(error)) from None
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_rank(nprocs)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PHALANX_TRACEBACKS": "once",
        "TORCH_FR_BUFFER_SIZE": "200",
    }
    if not torch.accelerator.is_available():
        # Otherwise Accelerate treats a rank of a launcher as a process that trains alone.
        defaults["ACCELERATE_USE_CPU"] = "true"
    if not _ALLOCATOR.keys() & environ.keys():
        defaults |= _ALLOCATOR
    return {name: value for name, value in defaults.items() if name not in environ}


def cgroup_limits(
    controller: str,
    read_v2: Callable[[Path], float | None],
    read_v1: Callable[[Path], float | None],
    root: str | Path = "/",
) -> list[float]:
    """Return the limits set by the control groups of this process and their ancestors.

    Args:
        controller: The name of the controller, "cpu" or "memory".
        read_v2: A function that reads the limit from the folder of a version 2 control group and
            returns None if it sets none.
        read_v1: The same for version 1.
        root: The directory that contains `proc` and `sys`; for tests.
    """
    root = Path(root)
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no control groups on this machine
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _ancestor_limits(root / "sys/fs/cgroup", path, read_v2)
        elif controller in controllers.split(","):
            for mount in {controllers, controller}:
                limits += _ancestor_limits(root / "sys/fs/cgroup" / mount, path, read_v1)
    return limits


def check_host(nprocs: int) -> None:
    """Check that this process can start `nprocs` ranks.

    Raises:
        LaunchError: `/proc` is not mounted, or this process may not open enough files.
    """
    try:
        open_files = (
            len(os.listdir(_OPEN_FILES)) - 1
        )  # without the descriptor of the listing itself
    except OSError as error:
        raise LaunchError(
            f"can't read {_OPEN_FILES} ({error.strerror}): Phalanx needs /proc to share memory "
            "between ranks and to watch them; mount it, for example with `mount -t proc proc /proc`"
        ) from None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files + _FILES + _FILES_PER_RANK * nprocs
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise LaunchError(
            f"this process may have {limit} files open and has {open_files}, but needs {needed} to "
            f"start {nprocs} rank{'s' * (nprocs > 1)}: raise the limit, for example with "
            f"`ulimit -n {max(1024, needed)}`"
        )


def _ancestor_limits(mount: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    group = mount / path.lstrip("/")
    limits = []
    for folder in (group, *group.parents):
        try:
            limit = read(folder)
        except (OSError, ValueError):  # inside a container, the path can be that of the host
            limit = None
        if limit is not None:
            limits.append(limit)
        if folder == mount:
            break
    return limits


def _read_v2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _read_v1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
