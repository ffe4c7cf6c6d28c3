"""Tensors to workers of the same host: copied once, into memory that the receiver maps.

A worker that sends has segments of blocks, each block of one power of two of bytes. It leases a
block to the receiver, whose tensor is a view of it; when that tensor's storage is gone, the
receiver ends the lease by a byte in the segment, and the block is used again: its pages are there
already, and often still in the cache. What a receiver that dies has leased is taken back.

The byte has two writers, one after the other: the sender writes 1 before it sends the message that
gives the block away, the receiver writes 0 after the last use of its tensor. Where the sender finds
0, it may write the block: the read of the byte and the copy that follows depend on one another by
control, and the receiver's reads of its tensor are over before the interpreter frees it, behind at
least one atomic operation on the count of its references.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from phalanx.errors import PhalanxError
from phalanx.rpc.wire import DTYPES, Place, Row

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SMALL", "Arena", "Gone", "Mapped", "Unmapped"]

SMALL = 4096
"""Up to this size, in bytes, a tensor's data are in the message itself: that is faster."""
_NONCE = 16
_SHAPE = struct.Struct("<QQQ")
"""Behind the nonce: a segment's number, the size of its blocks, how many they are."""
_FLAGS = 64
_HEAD = 4096
_SMALLEST_BLOCK = 64 * 2**10
_SEGMENT = 64 * 2**20
_MOST_BLOCKS = 256
_MOST_SPARE = 512 * 2**20
_MOST_MAPPED = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Who maps memory that becomes smaller is killed when it reads on."""
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


def _block_size(size: int) -> int:
    return max(_SMALLEST_BLOCK, 1 << (size - 1).bit_length())


class _Segment:
    """Blocks of one size."""

    def __init__(self, number: int, nonce: bytes, block: int) -> None:
        self.number, self.block = number, block
        self.count = max(1, min(_MOST_BLOCKS, _SEGMENT // block))
        self.size = _HEAD + self.count * block
        self.descriptor = os.memfd_create("phalanx-rpc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, self.size)  # pages come when they are written
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = mmap.mmap(self.descriptor, self.size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.memory[:_NONCE] = nonce
        _SHAPE.pack_into(self.memory, _NONCE, number, block, self.count)
        self.flags = np.frombuffer(self.memory, np.uint8, self.count, _FLAGS)
        self.address: int = self.flags.ctypes.data - _FLAGS
        """Of its first byte, here."""
        self.holders = [-1] * self.count
        self.used = 0
        """How many blocks have ever been used: their pages are there."""

    def free_block(self) -> int | None:
        """The lowest that is free, which is the likeliest to be in the cache."""
        free = int(self.flags.argmin())
        return None if self.flags[free] else free

    @property
    def idle(self) -> bool:
        return not self.flags.any()


class Arena:
    """What this worker sends from."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(_NONCE)
        self._lock = threading.Lock()
        self._numbers = 0
        self._segments: dict[int, list[_Segment]] = {}
        self._probe = self._new(_SMALLEST_BLOCK)

    @property
    def probe(self) -> int:
        """The descriptor of a segment: who can map it shares the host."""
        return self._probe.descriptor

    def put(self, tensor: Tensor, peer: int) -> Row:
        """Copy a tensor on the CPU, of any strides, into a block that is leased to `peer`.

        Raises:
            PhalanxError: There is no room for it.
        """
        size = tensor.numel() * tensor.element_size()
        with self._lock:
            try:
                segment, block = self._free(_block_size(size))
            except (OSError, OverflowError, ValueError) as error:
                raise PhalanxError(
                    f"no room for a tensor of {tuple(tensor.shape)} ({size} bytes) that is to be "
                    f"sent: {error}; look at `ulimit -n`, `ulimit -v` and at free memory"
                ) from None
            segment.flags[block] = 1
            segment.holders[block] = peer
        shape = tuple(tensor.shape)
        row = Row(tensor.dtype, Place.SHARED, shape, segment.number, segment.descriptor, block)
        offset = _HEAD + block * segment.block
        try:
            if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                ctypes.memmove(segment.address + offset, tensor.data_ptr(), size)
            else:
                copy = torch.frombuffer(
                    segment.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
                )
                with torch.no_grad():
                    copy.view(tensor.shape).copy_(tensor)
        except BaseException:
            self.take_back(row.segment, row.block)
            raise
        return row

    def forget(self, peer: int) -> None:
        """Take back what was leased to a worker that is dead."""
        with self._lock:
            for segments in self._segments.values():
                for segment in segments:
                    for block, holder in enumerate(segment.holders):
                        if holder == peer:
                            segment.holders[block] = -1
                            segment.flags[block] = 0

    def take_back(self, number: int, block: int, holder: int | None = None) -> None:
        """End the lease of a block that never left, or that its holder couldn't map.

        Args:
            number: The segment's.
            block: Its number there.
            holder: Who says so; None: this worker. Others' blocks stay theirs.
        """
        with self._lock:
            for segments in self._segments.values():
                for segment in segments:
                    if segment.number != number or not 0 <= block < segment.count:
                        continue
                    if holder is None or segment.holders[block] == holder:
                        segment.flags[block] = 0

    @property
    def leased(self) -> int:
        """How many blocks are leased."""
        with self._lock:
            segments = [each for same in self._segments.values() for each in same]
            return sum(int(np.count_nonzero(each.flags)) for each in segments)

    def close(self) -> None:
        """Let go; what others have mapped stays theirs."""
        with self._lock:
            for segments in self._segments.values():
                for segment in segments:
                    os.close(segment.descriptor)
            self._segments.clear()

    def _free(self, block: int) -> tuple[_Segment, int]:
        for segment in self._segments.get(block, ()):
            if (free := segment.free_block()) is not None:
                segment.used = max(segment.used, free + 1)
                return segment, free
        self._trim()
        segment = self._new(block)
        segment.used = 1
        return segment, 0

    def _new(self, block: int) -> _Segment:
        segment = _Segment(self._numbers, self.nonce, block)
        self._numbers += 1
        self._segments.setdefault(block, []).append(segment)
        return segment

    def _trim(self) -> None:
        """Give memory back that nobody uses, where it is much."""
        idle = [
            segment
            for same in self._segments.values()
            for segment in same
            if segment is not self._probe and segment.idle
        ]
        if sum(segment.used * segment.block for segment in idle) <= _MOST_SPARE:
            return
        for segment in idle:
            self._segments[segment.block].remove(segment)
            os.close(segment.descriptor)


class _Theirs:
    """A segment of another worker, mapped."""

    def __init__(self, pid: int, descriptor: int, nonce: bytes) -> None:
        try:
            opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unmapped(error.strerror) from None
        try:
            head = os.pread(opened, _NONCE + _SHAPE.size, 0)
            if len(head) < _NONCE + _SHAPE.size or head[:_NONCE] != nonce:
                raise Gone("it is another's")
            self.number, self.block, self.count = _SHAPE.unpack_from(head, _NONCE)
            self.size = os.fstat(opened).st_size
            whole = _HEAD + self.block * self.count == self.size
            sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not (whole and sealed and 0 < self.count <= _MOST_BLOCKS):
                raise Gone("it isn't as segments are")
            self.memory = mmap.mmap(opened, self.size)
        except OSError as error:
            raise Unmapped(error.strerror) from None
        except (ValueError, OverflowError) as error:
            raise Gone(str(error)) from None
        finally:
            os.close(opened)
        self.flags: Any = np.frombuffer(self.memory, np.uint8, self.count, _FLAGS)


class _Lease(np.ndarray[Any, Any]):
    """A block's bytes; when the last view is gone, so is the lease."""

    end: tuple[Any, int, int] | None = None

    def __del__(self) -> None:
        if self.end is not None:
            flags, block, forks = self.end
            if forks == _forks[0]:
                flags[block] = 0


class Mapped:
    """What others send to this worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: OrderedDict[tuple[int, int], _Theirs] = OrderedDict()

    def take(self, row: Row, source: int, pid: int, nonce: bytes) -> Tensor:
        """A tensor that views a block leased to this worker.

        Raises:
            Gone: There is no such block, or (`Unmapped`) no room for it here.
        """
        segment = self._segment(row, source, pid, nonce)
        if row.block >= segment.count or row.size > segment.block or not segment.flags[row.block]:
            raise Gone(f"it has leased no block {row.block} of {row.size} bytes")
        offset = _HEAD + row.block * segment.block
        dtype = _NUMPY.get(row.dtype) if len(row.shape) <= _NUMPY_DIMENSIONS else None
        what = ((row.size,), np.uint8) if dtype is None else (row.shape, dtype)
        lease: _Lease = _Lease.__new__(_Lease, what[0], what[1], segment.memory, offset)
        lease.end = segment.flags, row.block, _forks[0]
        tensor = torch.from_numpy(lease)
        return tensor.view(row.dtype).view(row.shape) if dtype is None else tensor

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
