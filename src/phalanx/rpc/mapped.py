"""What workers of the same host send tensors in, mapped; `memory.py` tells of the lease."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from phalanx.rpc.memory import (
    FILLING,
    FLAGS,
    FREE,
    HEAD,
    LEASED,
    MOST_BLOCKS,
    NONCE,
    SEALS,
    SHAPE,
)
from phalanx.rpc.spin import Spin
from phalanx.rpc.wire import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from phalanx.rpc.wire import Row

__all__ = ["Gone", "Late", "Mapped", "Unmapped", "Unwritten", "opens"]

_MOST_MAPPED = 64
_LOOK, _STEP = 1e-3, 2e-4
"""Seconds that a receiver looks for a copy before it sleeps, and sleeps before it looks again."""
_forks = [0]
"""How often this process has been forked off: what its parent leased isn't its own to give back."""


def _forked() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_forked)

_NUMPY_DIMENSIONS = 32
_NUMPY = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in DTYPES
    if dtype is not torch.bfloat16
}
"""NumPy's name of each dtype that it has."""


class Gone(Exception):  # noqa: N818 - it says what the memory is
    """A segment can't be mapped: its owner is gone, or it never was."""


class Unmapped(Gone):
    """It is there, but this process has no room for it; the lease goes on."""


class Unwritten(Gone):
    """Its owner died, or was interrupted, before the copy was made."""


class Late(Exception):  # noqa: N818 - it says what the memory is
    """A block wasn't written in time."""


class _Theirs:
    """A segment of another worker, mapped."""

    def __init__(self, pid: int, descriptor: int, nonce: bytes) -> None:
        try:
            opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unmapped(error.strerror) from None
        try:
            head = os.pread(opened, NONCE + SHAPE.size, 0)
            if len(head) < NONCE + SHAPE.size or head[:NONCE] != nonce:
                raise Gone("it is another's")
            self.number, self.block, self.count = SHAPE.unpack_from(head, NONCE)
            self.size = os.fstat(opened).st_size
            whole = HEAD + self.block * self.count == self.size
            sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS == SEALS
            if not (whole and sealed and 0 < self.count <= MOST_BLOCKS):
                raise Gone("it isn't as segments are")
            self.memory = mmap.mmap(opened, self.size)
        except OSError as error:
            raise Unmapped(error.strerror) from None
        except (ValueError, OverflowError) as error:
            raise Gone(str(error)) from None
        finally:
            os.close(opened)
        self.flags: Any = np.frombuffer(self.memory, np.uint8, self.count, FLAGS)


class _Lease(np.ndarray[Any, Any]):
    """A block's bytes; when the last view is gone, so is the lease."""

    end: tuple[Any, int, int] | None = None

    def __del__(self) -> None:
        if self.end is not None:
            flags, block, forks = self.end
            if forks == _forks[0]:
                flags[block] = FREE


class Mapped:
    """What others send to this worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: OrderedDict[tuple[int, int], _Theirs] = OrderedDict()

    def take(
        self,
        row: Row,
        source: int,
        pid: int,
        nonce: bytes,
        end: float,
        is_lost: Callable[[], bool],
    ) -> Tensor:
        """A tensor that views a block leased to this worker; blocks until it is written.

        Args:
            row: What the message says of it.
            source: Who sent it.
            pid: The process of that worker.
            nonce: Of its memory.
            end: When to give up, in monotonic seconds.
            is_lost: Whether that worker can write no more.

        Raises:
            Gone: There is no such block, or no room for it here (`Unmapped`), or it will never be
                written (`Unwritten`).
            Late: It wasn't written before `end`.
        """
        segment = self._segment(row, source, pid, nonce)
        flag = segment.flags[row.block] if row.block < segment.count else FREE
        if flag == FREE or row.size > segment.block:
            raise Gone(f"it has leased no block {row.block} of {row.size} bytes")
        if flag == FILLING:
            flag = self._written(segment.flags, row.block, end, is_lost)
        if flag != LEASED:
            segment.flags[row.block] = FREE
            raise Unwritten("it was interrupted before it had written them")
        offset = HEAD + row.block * segment.block
        dtype = _NUMPY.get(row.dtype) if len(row.shape) <= _NUMPY_DIMENSIONS else None
        what = ((row.size,), np.uint8) if dtype is None else (row.shape, dtype)
        lease: _Lease = _Lease.__new__(_Lease, what[0], what[1], segment.memory, offset)
        lease.end = segment.flags, row.block, _forks[0]
        tensor = torch.from_numpy(lease)
        return tensor.view(row.dtype).view(row.shape) if dtype is None else tensor

    def _written(self, flags: Any, block: int, end: float, is_lost: Callable[[], bool]) -> int:
        """What a block's byte says once its copy is over."""

        def is_written() -> bool:
            return bool(flags[block] != FILLING)

        if not Spin(min(_LOOK, end - time.monotonic())).look(is_written):
            while not is_written():
                if is_lost() and not is_written():
                    raise Unwritten("it died before it had written them")
                if time.monotonic() >= end:
                    raise Late
                time.sleep(_STEP)
        return int(flags[block])

    def forget(self, source: int) -> None:
        """Unmap, as soon as no tensor needs it, what a worker that is dead has sent."""
        with self._lock:
            for key in [key for key in self._segments if key[0] == source]:
                del self._segments[key]

    def _segment(self, row: Row, source: int, pid: int, nonce: bytes) -> _Theirs:
        key = source, row.segment
        with self._lock:
            if (segment := self._segments.get(key)) is None:
                segment = _Theirs(pid, row.descriptor, nonce)
                if segment.number != row.segment:
                    raise Gone(f"it is segment {segment.number}, where {row.segment} was meant")
                self._segments[key] = segment
                while len(self._segments) > _MOST_MAPPED:
                    self._segments.popitem(last=False)
            else:
                self._segments.move_to_end(key)
            return segment


def opens(pid: int, descriptor: int, nonce: bytes) -> bool:
    """Whether this process can map another's segment, and it is the one that was meant."""
    try:
        _Theirs(pid, descriptor, nonce)
    except Gone:
        return False
    return True
