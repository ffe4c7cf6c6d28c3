"""Shared memory from which a worker sends tensors on its host; `layout.py` describes the lease."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from phalanx.errors import PhalanxError
from phalanx.rpc.message import TensorDescriptor, TensorLocation
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
    UNWRITTEN,
)

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

__all__ = ["DeferredCopies", "ShmSender"]

_MIN_BLOCK = 64 * 2**10
_SEGMENT = 64 * 2**20
_MAX_IDLE = 512 * 2**20
_MIN_DEFERRED_COPY = 256 * 2**10
"""The size in bytes from which a tensor is copied after its message has been sent."""
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")


def _block_size(size: int) -> int:
    return max(_MIN_BLOCK, 1 << (size - 1).bit_length())


class _Segment:
    """A shared memory segment of blocks of one size."""

    def __init__(self, number: int, nonce: bytes, block: int) -> None:
        self.number, self.block = number, block
        self.count = max(1, min(MAX_BLOCKS, _SEGMENT // block))
        self.size = HEAD + self.count * block
        self.fd = os.memfd_create("phalanx-rpc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, self.size)  # pages are allocated when they are written
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.memory = mmap.mmap(self.fd, self.size)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory[:NONCE] = nonce
        SHAPE.pack_into(self.memory, NONCE, number, block, self.count)
        self.flags = np.frombuffer(self.memory, np.uint8, self.count, FLAGS)
        self.address: int = self.flags.ctypes.data - FLAGS
        """The address of its first byte in this process."""
        self.holders = [-1] * self.count
        self.active_copies: dict[int, DeferredCopies] = {}
        """Blocks with a copy in progress, and its maker; they are not reused before it ends."""
        self.used = 0
        """The number of blocks that have ever been used, whose pages are thus allocated."""

    def free_block(self) -> int | None:
        """Return the lowest free block, the likeliest to be in the cache; None if there is none."""
        free = int(self.flags.argmin())
        return None if self.flags[free] else free

    @property
    def is_idle(self) -> bool:
        return not self.flags.any()

    def end_lease(self, block: int) -> None:
        """End the lease of a block; if a copy to it is in progress, free the block afterwards."""
        self.holders[block] = -1
        if block not in self.active_copies:
            self.flags[block] = FREE

    def write(self, block: int, tensor: Tensor) -> None:
        """Copy a tensor to a block."""
        offset = HEAD + block * self.block
        if _is_plain(tensor):
            size = tensor.numel() * tensor.element_size()
            ctypes.memmove(self.address + offset, tensor.data_ptr(), size)
            return
        flat = torch.frombuffer(
            self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
        )
        with torch.no_grad():
            flat.view(tensor.shape).copy_(tensor)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class DeferredCopies:
    """Copies made after their message has been sent: a context manager around the sending.

    If the sending raises, the copies are not made, and their blocks are marked `UNWRITTEN` for a
    receiver that may have got the message.
    """

    def __init__(self, sender: ShmSender) -> None:
        self._sender = sender
        self._pending: list[tuple[_Segment, int, Tensor]] = []

    def add(self, segment: _Segment, block: int, tensor: Tensor) -> None:
        """Add a copy to make later."""
        self._pending.append((segment, block, tensor))

    def make(self) -> None:
        """Make the pending copies."""
        for segment, block, tensor in self._pending:
            segment.write(block, tensor)
            self._sender.finish_copy(segment, block, self, LEASED)
        self._pending.clear()

    def cancel(self, flag: int = FREE) -> None:
        """Drop the pending copies and set the bytes of their blocks to `flag`."""
        for segment, block, _ in self._pending:
            self._sender.finish_copy(segment, block, self, flag)
        self._pending.clear()

    def __enter__(self) -> DeferredCopies:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.make()
        finally:
            self.cancel(UNWRITTEN)


class ShmSender:
    """The shared memory from which this worker sends tensors."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE)
        self._lock = threading.Lock()
        self._numbers = 0
        self._segments: dict[int, list[_Segment]] = {}
        self._probe = self._new(_MIN_BLOCK)

    @property
    def probe(self) -> int:
        """The descriptor of a segment; a process that can map it is on the same host."""
        return self._probe.fd

    def put(
        self, tensor: Tensor, peer: int, deferred: DeferredCopies | None = None
    ) -> TensorDescriptor:
        """Copy a CPU tensor of any strides into a block that is leased to `peer`.

        Args:
            tensor: The tensor.
            peer: The id of the receiver.
            deferred: Takes the copy of a large tensor, to be made after its message has been sent.

        Raises:
            PhalanxError: There is no room for the tensor.
        """
        size = tensor.numel() * tensor.element_size()
        is_deferred = (
            deferred is not None
            and size >= _MIN_DEFERRED_COPY
            and _KEEPS_ORDER
            and _is_plain(tensor)
        )
        copies = deferred if deferred is not None and is_deferred else DeferredCopies(self)
        with self._lock:
            try:
                segment, block = self._free(_block_size(size))
            except (OSError, OverflowError, ValueError) as error:
                raise PhalanxError(
                    f"not enough memory to send a tensor of {tuple(tensor.shape)} ({size} bytes): "
                    f"{error}; check `ulimit -n`, `ulimit -v` and free memory"
                ) from None
            segment.flags[block] = FILLING
            segment.holders[block], segment.active_copies[block] = peer, copies
        copies.add(segment, block, tensor)
        if not is_deferred:
            try:
                copies.make()
            except BaseException:
                copies.cancel()
                raise
        shape = tuple(tensor.shape)
        return TensorDescriptor(
            tensor.dtype, TensorLocation.SHARED, shape, segment.number, segment.fd, block
        )

    def finish_copy(self, segment: _Segment, block: int, copies: DeferredCopies, flag: int) -> None:
        """Record that a copy was made or dropped; the byte of a leased block becomes `flag`."""
        with self._lock:
            if segment.active_copies.get(block) is copies:
                del segment.active_copies[block]
                segment.flags[block] = flag if segment.holders[block] >= 0 else FREE

    def forget(self, peer: int) -> None:
        """End the leases of a dead worker."""
        with self._lock:
            for segments in self._segments.values():
                for segment in segments:
                    for block, holder in enumerate(segment.holders):
                        if holder == peer:
                            segment.end_lease(block)

    def reclaim(self, number: int, block: int, holder: int | None = None) -> None:
        """End the lease of a block that was never sent or that its holder could not map.

        Args:
            number: The number of the segment.
            block: The number of the block in the segment.
            holder: The worker that returns the block; blocks of other holders stay leased. None if
                this worker takes the block back, whoever holds it.
        """
        with self._lock:
            for segments in self._segments.values():
                for segment in segments:
                    if segment.number != number or not 0 <= block < segment.count:
                        continue
                    if holder is None or segment.holders[block] == holder:
                        segment.end_lease(block)

    @property
    def leased_count(self) -> int:
        """The number of blocks that are leased."""
        with self._lock:
            segments = [each for same in self._segments.values() for each in same]
            return sum(int(np.count_nonzero(each.flags)) for each in segments)

    def close(self) -> None:
        """Close the segments; receivers keep their mappings."""
        with self._lock:
            for segments in self._segments.values():
                for segment in segments:
                    os.close(segment.fd)
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
        """Release the idle segments if they hold more than `_MAX_IDLE` bytes."""
        idle = [
            segment
            for same in self._segments.values()
            for segment in same
            if segment is not self._probe and segment.is_idle
        ]
        if sum(segment.used * segment.block for segment in idle) <= _MAX_IDLE:
            return
        for segment in idle:
            self._segments[segment.block].remove(segment)
            os.close(segment.fd)
