"""The resources of a process: descriptors, mappings of segments, threads and memory."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """The resources of a process at one moment."""

    descriptors: int
    segments: int
    """Number of mappings of Phalanx's memory files."""
    threads: int
    resident: int
    """Bytes of private and shared memory."""

    def exceeds(self, before: Resources | None) -> list[str]:
        """Return the names of the resources that have grown, except memory."""
        if before is None:
            return []
        names = ("descriptors", "segments", "threads")
        return [name for name in names if getattr(self, name) > getattr(before, name)]


def settled_resources(before: Resources | None) -> Resources:
    """Measure this process after it has returned free memory to the kernel.

    If resources have grown, wait up to a minute, for example for threads to end.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    deadline = time.monotonic() + 60
    while (now := measure_resources()).exceeds(before) and time.monotonic() < deadline:
        time.sleep(0.005)
    return now


def measure_resources() -> Resources:
    """Measure the resources of this process."""
    maps = Path("/proc/self/maps").read_text()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Resources(
        len(os.listdir("/proc/self/fd")) - 1,  # minus the one that lists them
        maps.count("/memfd:phalanx"),
        len(os.listdir("/proc/self/task")),
        pages * os.sysconf("SC_PAGE_SIZE"),
    )


def shared_files() -> frozenset[str]:
    """Return the names of the files in /dev/shm."""
    return frozenset(os.listdir("/dev/shm"))
