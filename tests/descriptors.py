"""The open file descriptors of a process, for tests of leaks."""

from __future__ import annotations

import gc
import os


def list_descriptors() -> list[str]:
    """Return this process's descriptors, without those that only garbage of earlier tests holds.

    The collector could close these at any time, between two calls too.
    """
    gc.collect()
    return os.listdir("/proc/self/fd")
