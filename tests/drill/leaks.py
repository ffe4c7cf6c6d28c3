"""What a process holds: descriptors, mappings of segments, memory."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Holdings:
    """What a process holds at one moment."""

    descriptors: int
    segments: int
    """Mappings of memory files of Phalanx."""
    threads: int
    resident: int
    """Bytes of private and shared memory."""

    def exceeds(self, before: Holdings | None) -> list[str]:
        """What there is more of than before, memory aside."""
        if before is None:
            return []
        names = ("descriptors", "segments", "threads")
        return [name for name in names if getattr(self, name) > getattr(before, name)]


def settled(before: Holdings | None) -> Holdings:
    """Of this process, now, without what its allocator keeps for later.

    Ends of threads and the like have half a second, if it holds more than before.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    deadline = time.monotonic() + 0.5
    while (now := holdings()).exceeds(before) and time.monotonic() < deadline:
        time.sleep(0.005)
    return now


def holdings() -> Holdings:
    """Of this process, now."""
    maps = Path("/proc/self/maps").read_text()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Holdings(
        len(os.listdir("/proc/self/fd")) - 1,  # less the one that lists them
        maps.count("/memfd:phalanx"),
        len(os.listdir("/proc/self/task")),
        pages * os.sysconf("SC_PAGE_SIZE"),
    )


def shared_files() -> frozenset[str]:
    """What lies in /dev/shm."""
    return frozenset(os.listdir("/dev/shm"))
