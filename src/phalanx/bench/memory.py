"""The memory's own speed: the limit that every operation is compared with.

Each rank copies arrays far larger than the caches, all at the same time, in each of two ways. The
bytes that are read count, and those that are written. The faster way is the limit: `copy` is one
call of the C library, which may write past the caches then; `blocks` copies half a MiB at a time,
which goes through them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["METHODS", "Streams"]

METHODS = ("copy", "blocks")
_BLOCK = 2**16


class Streams:
    """The arrays of one rank."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.int64]] = []

    def run(self, method: str, size: int, start: float, seconds: float) -> float:
        """Copy in one way, from `start` (monotonic) on; returns bytes a second.

        Args:
            method: one of METHODS.
            size: bytes of each of two arrays.
            start: when to begin.
            seconds: for how long, to the end of the pass that is running then.
        """
        if not self._arrays:
            self._arrays = [np.ones(size // 8, np.int64) for _ in range(2)]
        source, target = self._arrays
        pieces = [slice(i, i + _BLOCK) for i in range(0, source.size, _BLOCK)]
        while time.monotonic() < start:
            pass
        moved, began = 0, time.perf_counter()
        while (taken := time.perf_counter() - began) < seconds or moved == 0:
            if method == "copy":
                np.copyto(target, source)
            else:
                for piece in pieces:
                    target[piece] = source[piece]
            moved += source.nbytes + target.nbytes
        return moved / taken
