"""Sends and receives between hosts: their tags, their memory, and the limits of every wait.

A wait ends when its transfer ends, at the deadline, when the group is broken (possibly by another
rank of the same host), or when the connection is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from phalanx import _native
from phalanx.transports import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.transports import Transfer, Transport

__all__ = [
    "CHECK_INTERVAL",
    "ELEMENT_SIZES",
    "ENVELOPES_TAG",
    "LIVENESS_TAG",
    "ConnectionLost",
    "DeadlineExceeded",
    "GroupBroken",
    "OperationTransfers",
    "PostedTransfer",
    "bytes_at",
    "chunk_tag",
    "data_tag",
    "drain",
]

_CHUNK_TAGS = 4096
"""The number of tags for the chunks of a collective, from tag 1 on.

Tag 0 is for the headers exchanged before a collective and for transfers that are not in chunks.
"""
LIVENESS_TAG = _CHUNK_TAGS + 1
ENVELOPES_TAG = _CHUNK_TAGS + 2
_FIRST_DATA_TAG = _CHUNK_TAGS + 3
_DATA_TAGS = 2**20
CHECK_INTERVAL = 0.02
"""Seconds between two checks whether the group is broken, during a wait."""
_DRAIN_SECONDS = 5.0
"""Seconds that an aborted transport has to end its pending transfers."""

ELEMENT_SIZES = {number: getattr(torch, name).itemsize for name, number in _native.DTYPES.items()}
"""Element sizes of the core's dtypes, in bytes."""


def chunk_tag(number: int) -> int:
    """Return the tag of a collective's n-th chunk; all chunks in flight have different tags."""
    return 1 + number % _CHUNK_TAGS


def data_tag(number: int) -> int:
    """Return the tag of the data of a sender's n-th message."""
    return _FIRST_DATA_TAG + number % _DATA_TAGS


class GroupBroken(Exception):  # noqa: N818 - ends an operation early; not yet an error
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
    """A posted transfer with its destination or source rank."""

    transfer: Transfer
    peer: int


class OperationTransfers:
    """The sends and receives of one operation between hosts.

    Args:
        native: The native group of this host.
        transport: The transport that carries the bytes.
        deadline: The deadline of the operation, in seconds on the monotonic clock.
        create_failure_check: Returns, for one wait, the function that checks for failures reported
            by other ranks; see `FailurePropagator.create_failure_check`.
    """

    def __init__(
        self,
        native: _native.Group,
        transport: Transport,
        deadline: float,
        create_failure_check: Callable[[], Callable[[], None]],
    ) -> None:
        self._native = native
        self._create_failure_check = create_failure_check
        self._transport = transport
        self.deadline = deadline
        self._pending: dict[int, PostedTransfer] = {}

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 1 ms, for operations with their own timeout."""
        return max(1e-3, self.deadline - time.monotonic())

    def send(self, data: memoryview, peer: int, tag: int = 0) -> PostedTransfer:
        """Post a send of at least one byte to a rank of the group."""
        try:
            return self._track(PostedTransfer(self._transport.send(data, peer, tag), peer))
        except TransportError as error:
            raise ConnectionLost(peer, error) from None

    def recv(self, data: memoryview, peer: int, tag: int = 0) -> PostedTransfer:
        """Post a receive of at least one byte from a rank of the group."""
        try:
            return self._track(PostedTransfer(self._transport.recv(data, peer, tag), peer))
        except TransportError as error:
            raise ConnectionLost(peer, error) from None

    def wait(self, *transfers: PostedTransfer) -> None:
        """Block until all given transfers have ended."""
        for transfer, peer in transfers:
            self._wait(transfer, peer)
            self._pending.pop(id(transfer), None)

    def drain(self) -> None:
        """Wait until no pending transfer uses memory that the operation no longer owns.

        Blocks until the transport has ended all pending transfers, for some seconds at most.
        """
        drain(transfer for transfer, _ in self._pending.values())
        self._pending.clear()

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
                if time.monotonic() >= self.deadline:
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
