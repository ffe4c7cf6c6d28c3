"""Shared memory of other workers, mapped by the receiver; `layout.py` describes the lease."""

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

from phalanx.rpc.event_loop import SpinPolicy
from phalanx.rpc.message import DTYPES
from phalanx.rpc.shared_memory.layout import (
    FILLING,
    FLAGS,
    FREE,
    HEAD,
    LEASED,
    MAX_BLOCKS,
    NONCE,
    SEALS,
    SHAPE,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from phalanx.rpc.message import TensorDescriptor

__all__ = [
    "CopyFailure",
    "CopyTimeout",
    "MappingFailure",
    "SegmentUnavailable",
    "ShmReceiver",
    "can_map",
]

_MAX_MAPPED = 64
_SPIN_SECONDS, _POLL_SECONDS = 1e-3, 2e-4
"""Seconds that a receiver spins for a copy, and seconds that it then sleeps between polls."""
_forks = [0]
"""The number of forks that led to this process; a child must not end leases of its parent."""


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_count_fork)

_NUMPY_DIMENSIONS = 32
_NUMPY = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in DTYPES
    if dtype is not torch.bfloat16
}
"""The NumPy dtype of each dtype that NumPy has."""


class SegmentUnavailable(Exception):  # noqa: N818 - the state of the memory
    """A segment cannot be mapped: its owner has exited, or it never existed."""


class MappingFailure(SegmentUnavailable):
    """The segment exists, but this process cannot map it; the lease continues."""


class CopyFailure(SegmentUnavailable):
    """The owner died, or was interrupted, before it made the copy."""


class CopyTimeout(Exception):  # noqa: N818 - the state of the memory
    """A block was not written in time."""


class _MappedSegment:
    """A mapped segment of another worker."""

    def __init__(self, pid: int, fd: int, nonce: bytes) -> None:
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise MappingFailure(error.strerror) from None
        try:
            head = os.pread(opened, NONCE + SHAPE.size, 0)
            if len(head) < NONCE + SHAPE.size or head[:NONCE] != nonce:
                raise SegmentUnavailable("it belongs to another process")
            self.number, self.block, self.count = SHAPE.unpack_from(head, NONCE)
            self.size = os.fstat(opened).st_size
            is_whole = HEAD + self.block * self.count == self.size
            is_sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS == SEALS
            if not (is_whole and is_sealed and 0 < self.count <= MAX_BLOCKS):
                raise SegmentUnavailable("it is not a valid segment")
            self.memory = mmap.mmap(opened, self.size)
        except OSError as error:
            raise MappingFailure(error.strerror) from None
        except (ValueError, OverflowError) as error:
            raise SegmentUnavailable(str(error)) from None
        finally:
            os.close(opened)
        self.flags: Any = np.frombuffer(self.memory, np.uint8, self.count, FLAGS)


class _Lease(np.ndarray[Any, Any]):
    """The bytes of a block; the lease ends with the last view of them."""

    end: tuple[Any, int, int] | None = None

    def __del__(self) -> None:
        if self.end is not None:
            flags, block, forks = self.end
            if forks == _forks[0]:
                flags[block] = FREE


class ShmReceiver:
    """The segments of other workers that this worker has mapped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: OrderedDict[tuple[int, int], _MappedSegment] = OrderedDict()

    def map_tensor(
        self,
        descriptor: TensorDescriptor,
        source: int,
        pid: int,
        nonce: bytes,
        end: float,
        is_unreachable: Callable[[], bool],
    ) -> Tensor:
        """Return a tensor that views a block leased to this worker; block until it is written.

        Args:
            descriptor: The tensor's entry in the table of the message.
            source: The id of the sender.
            pid: The process id of the sender.
            nonce: The nonce of the sender's memory.
            end: The deadline, in monotonic seconds.
            is_unreachable: A function that returns whether the sender can write no more.

        Raises:
            SegmentUnavailable: There is no such block, it cannot be mapped (`MappingFailure`), or
                it will never be written (`CopyFailure`).
            CopyTimeout: The block was not written before `end`.
        """
        segment = self._segment(descriptor, source, pid, nonce)
        flag = segment.flags[descriptor.block] if descriptor.block < segment.count else FREE
        if flag == FREE or descriptor.size > segment.block:
            raise SegmentUnavailable(
                f"the sender has leased no block {descriptor.block} of {descriptor.size} bytes"
            )
        if flag == FILLING:
            flag = self._wait_for_copy(segment.flags, descriptor.block, end, is_unreachable)
        if flag != LEASED:
            segment.flags[descriptor.block] = FREE
            raise CopyFailure("the sender was interrupted before it had written them")
        offset = HEAD + descriptor.block * segment.block
        dtype = _NUMPY.get(descriptor.dtype) if len(descriptor.shape) <= _NUMPY_DIMENSIONS else None
        if descriptor.strides is not None:
            dtype = None
        layout = ((descriptor.size,), np.uint8) if dtype is None else (descriptor.shape, dtype)
        lease: _Lease = _Lease.__new__(_Lease, layout[0], layout[1], segment.memory, offset)
        lease.end = segment.flags, descriptor.block, _forks[0]
        tensor = torch.from_numpy(lease)
        if dtype is not None:
            return tensor
        flat = tensor.view(descriptor.dtype)
        if descriptor.strides is None:
            return flat.view(descriptor.shape)
        return flat.as_strided(descriptor.shape, descriptor.strides)

    def _wait_for_copy(
        self, flags: Any, block: int, end: float, is_unreachable: Callable[[], bool]
    ) -> int:
        """Wait until the copy to a block is over, and return the block's byte."""

        def is_written() -> bool:
            return bool(flags[block] != FILLING)

        if not SpinPolicy(min(_SPIN_SECONDS, end - time.monotonic())).wait(is_written):
            while not is_written():
                if is_unreachable() and not is_written():
                    raise CopyFailure("the sender died before it had written them")
                if time.monotonic() >= end:
                    raise CopyTimeout
                time.sleep(_POLL_SECONDS)
        return int(flags[block])

    def forget(self, source: int) -> None:
        """Unmap the segments of a dead worker, each as soon as no tensor needs it."""
        with self._lock:
            for key in [key for key in self._segments if key[0] == source]:
                del self._segments[key]

    def _segment(
        self, descriptor: TensorDescriptor, source: int, pid: int, nonce: bytes
    ) -> _MappedSegment:
        key = source, descriptor.segment
        with self._lock:
            if (segment := self._segments.get(key)) is None:
                segment = _MappedSegment(pid, descriptor.fd, nonce)
                if segment.number != descriptor.segment:
                    raise SegmentUnavailable(
                        f"it is segment {segment.number}, expected {descriptor.segment}"
                    )
                self._segments[key] = segment
                while len(self._segments) > _MAX_MAPPED:
                    self._segments.popitem(last=False)
            else:
                self._segments.move_to_end(key)
            return segment


def can_map(pid: int, fd: int, nonce: bytes) -> bool:
    """Return whether this process can map another's segment and its nonce is the expected one."""
    try:
        _MappedSegment(pid, fd, nonce)
    except SegmentUnavailable:
        return False
    return True
