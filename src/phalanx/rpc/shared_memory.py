"""Tensors in shared memory of a host: copied once, into memory that the receiver maps.

A worker that sends has segments of blocks; the blocks of a segment have one size, a power of two in
bytes. It leases a block to the receiver, whose tensor is a view of the block. When the storage of
that tensor is freed, the block returns to the sender, which uses it again. The sender takes back
the blocks leased to a receiver that dies.

A large tensor is copied while its message is in transit, so that the receiver wakes and unpickles
meanwhile. The receiver waits for the end of the copy.

The leases are those of the core (`native/include/phalanx/leases.h`). This module decides about the
segments: the sizes of their blocks, when a new one is made and when idle ones are released, and
which segments of other workers stay mapped.
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from phalanx._native import MAX_BLOCKS, LeaseSegment, LeaseSegmentView
from phalanx.errors import PhalanxError
from phalanx.rpc.message import DTYPES, WITHOUT_NUMPY, TensorDescriptor, TensorLocation

_MIN_BLOCK = 64 * 2**10
_SEGMENT = 64 * 2**20
_MAX_IDLE = 512 * 2**20
_MIN_DEFERRED_COPY = 256 * 2**10
"""The size in bytes from which a tensor is copied after its message has been sent."""
_MAX_MAPPED = 64
_WAIT_SECONDS = 5e-3
"""Seconds that a receiver waits for a copy before it checks the sender and the deadline."""

_NUMPY_DIMENSIONS = 32
_NUMPY = {
    dtype: np.dtype(str(dtype).removeprefix("torch."))
    for dtype in DTYPES
    if dtype not in WITHOUT_NUMPY
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


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _write(segment: LeaseSegment, block: int, lease: int, tensor: Tensor) -> None:
    """Copy a tensor to a leased block, and publish it."""
    size = tensor.numel() * tensor.element_size()
    if _is_plain(tensor):
        segment.write(block, lease, tensor.data_ptr(), size)
        return
    with torch.no_grad():
        data = torch.utils.dlpack.from_dlpack(segment.view(block))[:size].view(tensor.dtype)
        data.view(tensor.shape).copy_(tensor)
    segment.finish(block, lease, "leased")


class DeferredCopies:
    """Copies made after their message has been sent: a context manager around the sending.

    If the sending raises, the copies are not made, and their blocks are marked unwritten for a
    receiver that may have got the message.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[LeaseSegment, int, int, Tensor]] = []

    def add(self, segment: LeaseSegment, block: int, lease: int, tensor: Tensor) -> None:
        """Add a copy to make later."""
        self._pending.append((segment, block, lease, tensor))

    def cancel(self, state: str = "free") -> None:
        """Drop the pending copies; `state` becomes that of their blocks."""
        for segment, block, lease, _ in self._pending:
            segment.finish(block, lease, state)
        self._pending.clear()

    def __enter__(self) -> DeferredCopies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._pending:
            return
        try:
            if kind is None:
                for copy in self._pending:
                    _write(*copy)
        finally:
            self.cancel("unwritten")  # those that were made are finished already


class ShmSender:
    """The shared memory from which this worker sends tensors."""

    def __init__(self) -> None:
        self.nonce = secrets.randbits(64)
        self._lock = threading.Lock()
        self._numbers = 0
        self._segments: dict[int, list[LeaseSegment]] = {}
        self._probe = self._new(_MIN_BLOCK)

    @property
    def probe(self) -> int:
        """The descriptor of a segment; a process that can map it is on the same host."""
        return self._probe.descriptor

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
        shape = tuple(tensor.shape)
        with self._lock:
            try:
                segment, block, lease = self._lease(size, peer)
            except (OSError, OverflowError, ValueError) as error:
                raise PhalanxError(
                    f"not enough memory to send a tensor of {shape} ({size} bytes): "
                    f"{error}; check `ulimit -n`, `ulimit -v` and free memory"
                ) from None
        if deferred is not None and size >= _MIN_DEFERRED_COPY and _is_plain(tensor):
            deferred.add(segment, block, lease, tensor)
        else:
            try:
                _write(segment, block, lease, tensor)
            except BaseException:
                segment.finish(block, lease, "free")
                raise
        return TensorDescriptor(
            tensor.dtype, TensorLocation.SHARED, shape, segment.number, segment.descriptor, block
        )

    def forget(self, peer: int) -> None:
        """End the leases of a dead worker."""
        with self._lock:
            for segment in self._all():
                segment.take_back_all(peer)

    def reclaim(self, number: int, block: int, holder: int | None = None) -> None:
        """End the lease of a block that was never sent or that its holder could not map.

        Args:
            number: The number of the segment.
            block: The number of the block in the segment.
            holder: The worker that returns the block; blocks of other holders stay leased. None if
                this worker takes the block back, whoever holds it.
        """
        with self._lock:
            for segment in self._all():
                if segment.number == number and 0 <= block < MAX_BLOCKS:
                    segment.take_back(block, holder)

    @property
    def leased_count(self) -> int:
        """The number of blocks that are leased."""
        with self._lock:
            return sum(segment.leased for segment in self._all())

    def close(self) -> None:
        """Close the segments; receivers keep their mappings."""
        with self._lock:
            for segment in self._all():
                segment.close_descriptor()
            self._segments.clear()

    def _all(self) -> list[LeaseSegment]:
        return [segment for same in self._segments.values() for segment in same]

    def _lease(self, size: int, peer: int) -> tuple[LeaseSegment, int, int]:
        block_size = max(_MIN_BLOCK, 1 << (size - 1).bit_length())
        for segment in self._segments.get(block_size, ()):
            if (leased := segment.lease(peer)) is not None:
                return segment, *leased
        self._trim()
        self._new(block_size)
        return self._lease(size, peer)

    def _new(self, block_size: int) -> LeaseSegment:
        count = max(1, min(MAX_BLOCKS, _SEGMENT // block_size))
        segment = LeaseSegment.create(self._numbers, block_size, count, self.nonce)
        self._numbers += 1
        self._segments.setdefault(block_size, []).append(segment)
        return segment

    def _trim(self) -> None:
        """Release the idle segments if they hold more than `_MAX_IDLE` bytes."""
        idle = [each for each in self._all() if each is not self._probe and not each.leased]
        if sum(segment.used * segment.block_size for segment in idle) <= _MAX_IDLE:
            return
        for segment in idle:
            self._segments[segment.block_size].remove(segment)
            segment.close_descriptor()


class ShmReceiver:
    """The segments of other workers that this worker has mapped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: OrderedDict[tuple[int, int], LeaseSegmentView] = OrderedDict()

    def map_tensor(
        self,
        descriptor: TensorDescriptor,
        source: int,
        pid: int,
        nonce: int,
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
        block, size = descriptor.block, descriptor.size
        is_last_check = False
        while isinstance(lease := segment.take(block, size, _WAIT_SECONDS), str):
            if lease == "free":
                raise SegmentUnavailable(f"the sender has leased no block {block} of {size} bytes")
            if lease == "unwritten":
                raise CopyFailure("the sender was interrupted before it had written them")
            if is_last_check:
                raise CopyFailure("the sender died before it had written them")
            is_last_check = is_unreachable()
            if not is_last_check and time.monotonic() >= end:
                raise CopyTimeout
        dtype = _NUMPY.get(descriptor.dtype) if len(descriptor.shape) <= _NUMPY_DIMENSIONS else None
        if dtype is not None and descriptor.strides is None:
            return torch.from_numpy(np.ndarray(descriptor.shape, dtype, lease))
        flat = torch.from_numpy(np.ndarray(size, np.uint8, lease)).view(descriptor.dtype)
        if descriptor.strides is None:
            return flat.view(descriptor.shape)
        return flat.as_strided(descriptor.shape, descriptor.strides)

    def forget(self, source: int) -> None:
        """Unmap the segments of a dead worker, each as soon as no tensor needs it."""
        with self._lock:
            for key in [key for key in self._segments if key[0] == source]:
                del self._segments[key]

    def _segment(
        self, descriptor: TensorDescriptor, source: int, pid: int, nonce: int
    ) -> LeaseSegmentView:
        key = source, descriptor.segment
        with self._lock:
            if (segment := self._segments.get(key)) is not None:
                self._segments.move_to_end(key)
                return segment
            segment = _open(pid, descriptor.fd, nonce)
            if segment.number != descriptor.segment:
                raise SegmentUnavailable(
                    f"it is segment {segment.number}, expected {descriptor.segment}"
                )
            self._segments[key] = segment
            while len(self._segments) > _MAX_MAPPED:
                self._segments.popitem(last=False)
            return segment


def _open(pid: int, fd: int, nonce: int) -> LeaseSegmentView:
    """Map the segment of another worker."""
    try:
        return LeaseSegmentView.open(pid, fd, nonce)
    except OSError as error:
        if error.errno == errno.EPROTO:
            raise SegmentUnavailable("it belongs to another process") from None
        raise MappingFailure(error.strerror) from None


def can_map(pid: int, fd: int, nonce: int) -> bool:
    """Return whether this process can map another's segment and its nonce is the expected one."""
    try:
        _open(pid, fd, nonce)
    except SegmentUnavailable:
        return False
    return True
