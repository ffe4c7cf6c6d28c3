"""The memory bandwidth, with which every operation is compared.

All ranks copy arrays far larger than the caches at the same time, by two methods. Bytes read and
bytes written both count. The faster method is the limit. `copy` copies the whole array by one call
of the C library, which may write past the caches; `blocks` copies half a MiB at a time, through the
caches.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["METHODS", "StreamBenchmark"]

METHODS = ("copy", "blocks")
_BLOCK = 2**16


class StreamBenchmark:
    """The arrays of one rank."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.int64]] = []

    def run(self, method: str, size: int, start: float, seconds: float) -> float:
        """Copy memory by one method and return the bandwidth in bytes per second.

        Args:
            method: Name in METHODS.
            size: Size of each of two arrays in bytes; fixed by the first call.
            start: Start time on the clock of `time.monotonic`.
            seconds: Duration in seconds; the pass running at its end is completed.
        """
        if not self._arrays:
            self._arrays = [np.ones(size // 8, np.int64) for _ in range(2)]
        source, target = self._arrays
        blocks = [slice(i, i + _BLOCK) for i in range(0, source.size, _BLOCK)]
        while time.monotonic() < start:
            pass
        moved, began = 0, time.perf_counter()
        while (taken := time.perf_counter() - began) < seconds or moved == 0:
            if method == "copy":
                np.copyto(target, source)
            else:
                for block in blocks:
                    target[block] = source[block]
            moved += source.nbytes + target.nbytes
        return moved / taken
