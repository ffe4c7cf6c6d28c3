"""Execution of one operation: its transfers between hosts, its steps in memory, and their overlap.

A wait for a transfer ends when the transfer ends, at the deadline, when the group is broken
(possibly by another rank of the same host), or when the connection is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from phalanx import _native
from phalanx.hierarchical.encoding import Compression
from phalanx.hierarchical.links import Links
from phalanx.topology import Layout
from phalanx.transports import Transfer, Transport, TransportError

_CHUNK_TAGS = 4096
"""The number of tags for the chunks of a collective, from tag 1 on.

Tag 0 is for the headers exchanged before a collective and for transfers that are not in chunks.
"""
LIVENESS_TAG = _CHUNK_TAGS + 1
ENVELOPES_TAG = _CHUNK_TAGS + 2
MEASUREMENT_TAG = _CHUNK_TAGS + 3
_FIRST_DATA_TAG = _CHUNK_TAGS + 4
_DATA_TAGS = 2**20
CHECK_INTERVAL = 0.02
"""Seconds between two checks whether the group is broken, during a wait."""
_DRAIN_SECONDS = 5.0
"""Seconds that an aborted transport has to end its pending transfers."""
CHUNK_BYTES = 4 * 2**20
"""The bytes of one chunk of an operation, all ranks of a host together."""
CHUNKS_IN_FLIGHT = 4
"""The number of chunks in flight, so that the network never waits for memory."""
_SMALL_BYTES = 64 * 1024
LEADER = 0
"""The local rank of a host's leader."""

ELEMENT_SIZES: dict[int, int] = {
    number: getattr(torch, name).itemsize for name, number in _native.DTYPES.items()
}
"""Element sizes of the core's dtypes, in bytes."""
_SUM = _native.REDUCE_OPS["sum"]
_AVG = _native.REDUCE_OPS["avg"]


def data_tag(number: int) -> int:
    """Return the tag of the data of a sender's n-th message."""
    return _FIRST_DATA_TAG + number % _DATA_TAGS


class NativeFailure(Exception):  # noqa: N818 - ends an operation early; not yet an error
    """An operation of the native group has failed."""

    def __init__(self, status: _native.Status) -> None:
        super().__init__(status.code)
        self.status = status


class GroupBroken(Exception):  # noqa: N818
    """The native group of this host is broken; its status has the reason."""


class ConnectionLost(Exception):  # noqa: N818
    """The connection to a rank is closed.

    Args:
        peer: The rank that an operation needs.
        error: The transport's error. Its `peer`, if known, takes precedence: the cause may be
            another rank through which the connections lead.
    """

    def __init__(self, peer: int, error: TransportError) -> None:
        super().__init__(str(error))
        self.peer = peer if error.peer < 0 else error.peer


class DeadlineExceeded(Exception):  # noqa: N818
    """The deadline passed before a transfer with a rank ended."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


class PostedTransfer(NamedTuple):
    """A posted transfer.

    Attributes:
        transfer: The transfer.
        peer: Its destination or source rank.
        sent: The bytes that this rank sends by it.
        received: The bytes that this rank receives by it.
        begun_at: The time in nanoseconds of the monotonic clock.
        memory: An object that keeps its memory alive, if any: the transfer may outlast an operation
            that fails.
    """

    transfer: Transfer
    peer: int
    sent: int = 0
    received: int = 0
    begun_at: int = 0
    memory: object = None


Steps = Generator[list[PostedTransfer], None, None]
"""The steps of a chunk; yields the transfers that must complete before the next step."""


class Scratch(int):
    """The address of memory that lives as long as this object."""

    _memory: torch.Tensor

    @classmethod
    def allocate(cls, size: int) -> Scratch:
        """Allocate `size` bytes, uninitialized."""
        memory = torch.empty(max(1, size), dtype=torch.uint8, device="cpu")
        address = cls(memory.data_ptr())
        address._memory = memory
        return address


class Elements(NamedTuple):
    """The element type and operator of an operation.

    `dtype` is a value of `_native.DTYPES`, `op` one of `_native.REDUCE_OPS`.
    """

    dtype: int
    op: int
    ranks: int
    """World size of the group, the divisor of an average."""

    @property
    def bytes(self) -> int:
        """The size of one element in bytes."""
        return ELEMENT_SIZES[self.dtype]

    @property
    def partial_op(self) -> int:
        """The operator of all steps but the last."""
        return _SUM if self.op == _AVG else self.op

    def combine(self, output: int, sources: Sequence[int], count: int, *, last: bool) -> None:
        """Combine buffers of `count` elements in the order of `sources`.

        Args:
            output: The address of the result.
            sources: The addresses of the inputs.
            count: The number of elements of each buffer.
            last: Whether this is the last step, which divides an average.
        """
        op = self.op if last else self.partial_op
        _native.reduce(output, sources, count, self.dtype, op, float(self.ranks))


class Operation:
    """An operation composed of steps in memory and between hosts.

    Args:
        layout: The ranks of the group by host.
        elements: The element type and operator of the operation.
        native: The native group of this host.
        transport: The transport that carries bytes between hosts.
        deadline: The deadline, in seconds on the monotonic clock.
        create_failure_check: Returns, for one wait, the function that checks for failures reported
            by other ranks; see `FailurePropagator.create_failure_check`.
        links: The links between the hosts, which count the bytes.
        compression: The compression of what crosses between hosts, if any.
    """

    def __init__(
        self,
        layout: Layout,
        elements: Elements,
        native: _native.Group,
        transport: Transport,
        deadline: float,
        create_failure_check: Callable[[], Callable[[], None]],
        links: Links,
        compression: Compression | None = None,
    ) -> None:
        self.compression = compression
        self.layout = layout
        self.elements = elements
        self._native = native
        self._transport = transport
        self._deadline = deadline
        self._create_failure_check = create_failure_check
        self._links = links
        self._pending: dict[int, PostedTransfer] = {}

    def run_local(self, name: str, *arguments: object, extra: float = 0.0) -> None:
        """Run an operation of this host's native group.

        Args:
            name: The name of the method of `_native.Group`.
            *arguments: Its arguments, except for the timeout.
            extra: Seconds by which the operation may exceed the deadline.

        Raises:
            NativeFailure: The operation has failed.
        """
        remaining = max(1e-3, self._deadline - time.monotonic())
        status = getattr(self._native, name)(*arguments, remaining + extra)
        if status is not None:
            raise NativeFailure(status)

    def post_send(self, address: int, size: int, peer: int, tag: int = 0) -> list[PostedTransfer]:
        """Post a send of memory to a rank; post nothing if the size is 0."""
        return [self.send(bytes_at(address, size), peer, tag, address)] if size else []

    def post_recv(self, address: int, size: int, peer: int, tag: int = 0) -> list[PostedTransfer]:
        """Post a receive into memory from a rank; post nothing if the size is 0."""
        return [self.recv(bytes_at(address, size), peer, tag, address)] if size else []

    def send(
        self, data: memoryview, peer: int, tag: int = 0, memory: object = None
    ) -> PostedTransfer:
        """Post a send of at least one byte to a rank of the group."""
        begun_at = time.monotonic_ns()
        transfer = self._post(self._transport.send, data, peer, tag)
        return self._track(PostedTransfer(transfer, peer, len(data), 0, begun_at, memory))

    def recv(
        self, data: memoryview, peer: int, tag: int = 0, memory: object = None
    ) -> PostedTransfer:
        """Post a receive of at least one byte from a rank of the group."""
        begun_at = time.monotonic_ns()
        transfer = self._post(self._transport.recv, data, peer, tag)
        return self._track(PostedTransfer(transfer, peer, 0, len(data), begun_at, memory))

    def wait(self, *transfers: PostedTransfer) -> None:
        """Block until all given transfers have ended."""
        for posted in transfers:
            self._wait(posted.transfer, posted.peer)
            if self._pending.pop(id(posted.transfer), None) is not None:
                self._links.count(posted.peer, posted.sent, posted.received, posted.begun_at)

    def record_progress(self, done: int, total: int) -> None:
        """Record how many of the parts of the operation are done."""
        self._native.set_composite_progress(100 * done // total)

    def drain(self) -> None:
        """Wait until no pending transfer uses memory that the operation no longer owns.

        Blocks until the transport has ended all pending transfers, for some seconds at most.
        """
        drain(posted.transfer for posted in self._pending.values())
        self._pending.clear()

    def _post(
        self,
        start: Callable[[memoryview, int, int], Transfer],
        data: memoryview,
        peer: int,
        tag: int,
    ) -> Transfer:
        try:
            return start(data, peer, tag)
        except TransportError as error:
            raise ConnectionLost(peer, error) from None

    def _track(self, posted: PostedTransfer) -> PostedTransfer:
        self._pending[id(posted.transfer)] = posted
        return posted

    def _wait(self, transfer: Transfer, peer: int) -> None:
        try:
            if transfer.wait(0):
                return
            began = time.monotonic()
            self._native.begin_composite_wait(peer)
            check = self._create_failure_check()
            while not transfer.wait(CHECK_INTERVAL):
                check()
                if self._native.failure() is not None:
                    raise GroupBroken
                if time.monotonic() >= self._deadline:
                    raise DeadlineExceeded(peer)
            self._native.end_composite_wait(peer, time.monotonic() - began)
        except TransportError as error:
            raise ConnectionLost(peer, error) from None


def drain(transfers: Iterable[Transfer]) -> None:
    """Wait until transfers of a failed operation have ended, for some seconds at most."""
    end = time.monotonic() + _DRAIN_SECONDS
    for transfer in transfers:
        with contextlib.suppress(TransportError):
            transfer.wait(max(0.0, end - time.monotonic()))


def bytes_at(address: int, size: int) -> memoryview:
    """Return a writable view of `size` bytes at an address; the caller keeps the memory alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def dissemination_rounds(layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield the leaders to send to and to receive from in each round of a dissemination barrier.

    Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988. Each round
    doubles the number of hosts that a leader knows to have entered.
    """
    distance, hosts = 1, len(layout.hosts)
    while distance < hosts:
        ahead = layout.leaders[(layout.host + distance) % hosts]
        yield ahead, layout.leaders[layout.host - distance]
        distance *= 2


@dataclass(frozen=True)
class Chunk:
    """A part of an operation's elements."""

    offset: int
    """The position of the first byte."""
    count: int
    size: int
    """The size in bytes."""
    tag: int
    """The tag of the chunk's transfers, by which transfers of other chunks may overtake them."""


def is_for_rails(operation: Operation, count: int) -> bool:
    """Return whether the rails, rather than the leaders of the hosts, carry `count` elements."""
    return operation.layout.is_even and count * operation.elements.bytes > _SMALL_BYTES


def run_chunks(
    operation: Operation,
    steps: Callable[..., Steps],
    count: int,
    *arguments: object,
    parts: int = 1,
    multiple: int = 1,
) -> None:
    """Run the steps of all chunks of `count` elements, several chunks at a time.

    Each round runs the next step of every chunk in flight, the oldest first. All ranks of a host
    therefore reach their steps in memory in the same order, regardless of the network. There is one
    empty chunk if `count` is 0.

    Args:
        operation: The operation.
        steps: Returns the steps of a chunk, given the operation, the chunk and `arguments`.
        count: The number of elements.
        arguments: Further arguments of `steps`.
        parts: The number of parts of `count` elements that a host has.
        multiple: The number of which the count of all chunks but the last is a multiple.
    """
    max_count = CHUNK_BYTES // operation.elements.bytes // parts
    per_chunk = max(1, max_count - max_count % multiple)
    chunks = _split(count, per_chunk, operation.elements.bytes)
    done, total = 0, -(-count // per_chunk)
    source = (steps(operation, chunk, *arguments) for chunk in chunks)
    active: deque[tuple[Steps, list[PostedTransfer]]] = deque()
    while True:
        while len(active) < CHUNKS_IN_FLIGHT and (new := next(source, None)) is not None:
            active.append((new, []))
        if not active:
            return
        for _ in range(len(active)):
            step, transfers = active.popleft()
            operation.wait(*transfers)
            next_transfers = next(step, None)
            if next_transfers is not None:
                active.append((step, next_transfers))
            elif total > 1:
                done += 1
                operation.record_progress(done, total)


def _split(count: int, max_count: int, element_size: int) -> Iterator[Chunk]:
    for number, begin in enumerate(range(0, max(1, count), max_count)):
        length = min(max_count, count - begin)
        # All chunks in flight have different tags.
        tag = 1 + number % _CHUNK_TAGS
        yield Chunk(begin * element_size, length, length * element_size, tag)
