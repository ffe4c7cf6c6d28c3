"""What a worker sends tensors from, to workers of the same host; `memory.py` tells of the lease."""

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
    UNWRITTEN,
)
from phalanx.rpc.wire import Place, Row

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor

__all__ = ["Arena", "Copies"]

_SMALLEST_BLOCK = 64 * 2**10
_SEGMENT = 64 * 2**20
_MOST_SPARE = 512 * 2**20
_LATER = 256 * 2**10
"""From this size on, in bytes, a tensor is copied after its message was sent."""
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")


def _block_size(size: int) -> int:
    return max(_SMALLEST_BLOCK, 1 << (size - 1).bit_length())


class _Segment:
    """Blocks of one size."""

    def __init__(self, number: int, nonce: bytes, block: int) -> None:
        self.number, self.block = number, block
        self.count = max(1, min(MOST_BLOCKS, _SEGMENT // block))
        self.size = HEAD + self.count * block
        self.descriptor = os.memfd_create("phalanx-rpc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, self.size)  # pages come when they are written
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            self.memory = mmap.mmap(self.descriptor, self.size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.memory[:NONCE] = nonce
        SHAPE.pack_into(self.memory, NONCE, number, block, self.count)
        self.flags = np.frombuffer(self.memory, np.uint8, self.count, FLAGS)
        self.address: int = self.flags.ctypes.data - FLAGS
        """Of its first byte, here."""
        self.holders = [-1] * self.count
        self.filled: dict[int, Copies] = {}
        """Which blocks are copied to, and by whom: until that is over they are nobody else's."""
        self.used = 0
        """How many blocks have ever been used: their pages are there."""

    def free_block(self) -> int | None:
        """The lowest that is free, which is the likeliest to be in the cache."""
        free = int(self.flags.argmin())
        return None if self.flags[free] else free

    @property
    def idle(self) -> bool:
        return not self.flags.any()

    def end(self, block: int) -> None:
        """End its lease; if it is being copied to, as soon as that is over."""
        self.holders[block] = -1
        if block not in self.filled:
            self.flags[block] = FREE

    def fill(self, block: int, tensor: Tensor) -> None:
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


class Copies:
    """Copies that are made once their message has been sent: a context around its sending.

    If that ends by an exception they aren't made, and whoever may have got the message is told.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._left: list[tuple[_Segment, int, Tensor]] = []

    def add(self, segment: _Segment, block: int, tensor: Tensor) -> None:
        """Leave one to be made."""
        self._left.append((segment, block, tensor))

    def make(self) -> None:
        """Make them."""
        for segment, block, tensor in self._left:
            segment.fill(block, tensor)
            self._arena.filled(segment, block, self, LEASED)
        self._left.clear()

    def cancel(self, flag: int = FREE) -> None:
        """Don't make those that aren't made; `flag` is what their bytes are to say."""
        for segment, block, _ in self._left:
            self._arena.filled(segment, block, self, flag)
        self._left.clear()

    def __enter__(self) -> Copies:
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


class Arena:
    """What this worker sends from."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE)
        self._lock = threading.Lock()
        self._numbers = 0
        self._segments: dict[int, list[_Segment]] = {}
        self._probe = self._new(_SMALLEST_BLOCK)

    @property
    def probe(self) -> int:
        """The descriptor of a segment: who can map it shares the host."""
        return self._probe.descriptor

    def put(self, tensor: Tensor, peer: int, later: Copies | None = None) -> Row:
        """Copy a tensor on the CPU, of any strides, into a block that is leased to `peer`.

        Args:
            tensor: The tensor.
            peer: Who will get it.
            later: Where a large one may be left, to be copied once its message has been sent.

        Raises:
            PhalanxError: There is no room for it.
        """
        size = tensor.numel() * tensor.element_size()
        is_later = later is not None and size >= _LATER and _KEEPS_ORDER and _is_plain(tensor)
        copies = later if later is not None and is_later else Copies(self)
        with self._lock:
            try:
                segment, block = self._free(_block_size(size))
            except (OSError, OverflowError, ValueError) as error:
                raise PhalanxError(
                    f"no room for a tensor of {tuple(tensor.shape)} ({size} bytes) that is to be "
                    f"sent: {error}; look at `ulimit -n`, `ulimit -v` and at free memory"
                ) from None
            segment.flags[block] = FILLING
            segment.holders[block], segment.filled[block] = peer, copies
        copies.add(segment, block, tensor)
        if not is_later:
            try:
                copies.make()
            except BaseException:
                copies.cancel()
                raise
        shape = tuple(tensor.shape)
        return Row(tensor.dtype, Place.SHARED, shape, segment.number, segment.descriptor, block)

    def filled(self, segment: _Segment, block: int, by: Copies, flag: int) -> None:
        """A copy was made, or won't be: `flag` is what the block's byte says, if it is leased."""
        with self._lock:
            if segment.filled.get(block) is by:
                del segment.filled[block]
                segment.flags[block] = flag if segment.holders[block] >= 0 else FREE

    def forget(self, peer: int) -> None:
        """Take back what was leased to a worker that is dead."""
        with self._lock:
            for segments in self._segments.values():
                for segment in segments:
                    for block, holder in enumerate(segment.holders):
                        if holder == peer:
                            segment.end(block)

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
                        segment.end(block)

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
