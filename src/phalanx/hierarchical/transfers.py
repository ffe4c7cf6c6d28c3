"""Sends and receives between hosts, with the limits of every wait.

A wait ends when its transfer ends, at the deadline, when the group is broken (possibly by another
rank of the same host), or when the connection is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import TYPE_CHECKING, NamedTuple

from phalanx.transports import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx import _native
    from phalanx.transports import Transfer, Transport

__all__ = ["Broken", "Gone", "Late", "Links", "Posted", "bytes_at", "settle"]

_SLICE = 0.02
"""Seconds between two checks of a wait whether the group is broken."""
_SETTLE = 5.0
"""Seconds that an aborted transport has to end its pending transfers."""


class Broken(Exception):  # noqa: N818 - ends an operation early; not yet an error
    """The native group of this host is broken; its status has the reason."""


class Gone(Exception):  # noqa: N818
    """The connection to a rank is closed.

    Args:
        peer: The rank that an operation needs.
        error: The transport's error. Its `peer`, if known, takes precedence: the cause may be
            another rank through which the connections lead.
    """

    def __init__(self, peer: int, error: TransportError) -> None:
        super().__init__(str(error))
        self.peer = peer if error.peer < 0 else error.peer


class Late(Exception):  # noqa: N818
    """The deadline passed before a transfer with a rank ended."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


class Posted(NamedTuple):
    """A transfer with its destination or source rank."""

    transfer: Transfer
    peer: int


class Links:
    """The sends and receives of one operation between hosts.

    Args:
        native: The native group of this host.
        transport: The transport that carries the bytes.
        deadline: The deadline of the operation, in seconds on the monotonic clock.
        looking: Returns, for one wait, the function that checks for failures reported by other
            ranks; see `Failing.looking`.
    """

    def __init__(
        self,
        native: _native.Group,
        transport: Transport,
        deadline: float,
        looking: Callable[[], Callable[[], None]],
    ) -> None:
        self._native = native
        self._looking = looking
        self._transport = transport
        self.deadline = deadline
        self._posted: dict[int, Posted] = {}

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 1 ms, for operations with their own timeout."""
        return max(1e-3, self.deadline - time.monotonic())

    def send(self, data: memoryview, peer: int, tag: int = 0) -> Posted:
        """Post a send of at least one byte to a rank of the group."""
        try:
            return self._noted(Posted(self._transport.send(data, peer, tag), peer))
        except TransportError as error:
            raise Gone(peer, error) from None

    def recv(self, data: memoryview, peer: int, tag: int = 0) -> Posted:
        """Post a receive of at least one byte from a rank of the group."""
        try:
            return self._noted(Posted(self._transport.recv(data, peer, tag), peer))
        except TransportError as error:
            raise Gone(peer, error) from None

    def wait(self, *posted: Posted) -> None:
        """Block until all given transfers have ended."""
        for transfer, peer in posted:
            self._wait(transfer, peer)
            self._posted.pop(id(transfer), None)

    def settle(self) -> None:
        """Wait until no pending transfer uses memory that the operation no longer owns.

        Blocks until the transport has ended all pending transfers, for some seconds at most.
        """
        settle(transfer for transfer, _ in self._posted.values())
        self._posted.clear()

    def _noted(self, posted: Posted) -> Posted:
        self._posted[id(posted.transfer)] = posted
        return posted

    def _wait(self, transfer: Transfer, peer: int) -> None:
        try:
            if transfer.wait(0):
                return
            began = time.monotonic()
            self._native.begin_composite_wait(peer)
            look = self._looking()
            while not transfer.wait(_SLICE):
                look()
                if self._native.failure() is not None:
                    raise Broken
                if time.monotonic() >= self.deadline:
                    raise Late(peer)
            self._native.end_composite_wait(peer, time.monotonic() - began)
        except TransportError as error:
            raise Gone(peer, error) from None


def settle(transfers: Iterable[Transfer]) -> None:
    """Wait until transfers of a failed operation have ended, for some seconds at most."""
    end = time.monotonic() + _SETTLE
    for transfer in transfers:
        with contextlib.suppress(TransportError):
            transfer.wait(max(0.0, end - time.monotonic()))


def bytes_at(address: int, size: int) -> memoryview:
    """Return a writable view of `size` bytes at an address; the caller keeps the memory alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
