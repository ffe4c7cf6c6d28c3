"""Sends and receives between hosts, with the limits that every wait has.

A wait ends with its transfer; at the deadline; when the group is broken, which a rank of the same
host may have found; or when a connection is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import TYPE_CHECKING, NamedTuple

from phalanx.engines import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx import _native
    from phalanx.engines import Engine, Transfer

__all__ = ["Broken", "Gone", "Late", "Links", "Posted", "bytes_at", "settle"]

_SLICE = 0.02
"""Seconds after which a wait looks whether the group is broken."""
_SETTLE = 5.0
"""Seconds that an engine has for ending what is under way when it was aborted."""


class Broken(Exception):  # noqa: N818 - not an error yet: what ends an operation early
    """The native group of this host is broken: its status says why."""


class Gone(Exception):  # noqa: N818
    """The connection to a rank is closed.

    Args:
        peer: Whom an operation needs.
        error: What the engine says; it may know that somebody else is to blame, through whom its
            connections lead.
    """

    def __init__(self, peer: int, error: EngineError) -> None:
        super().__init__(str(error))
        self.peer = peer if error.peer < 0 else error.peer


class Late(Exception):  # noqa: N818
    """The deadline has come before a rank."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


class Posted(NamedTuple):
    """A transfer, and the rank that it is for or from."""

    transfer: Transfer
    peer: int


class Links:
    """What one operation sends to and receives from other hosts.

    Args:
        native: The group of this host.
        engine: What carries the bytes.
        deadline: When the operation is late, in monotonic seconds.
        looking: Gives a wait what it calls to hear what others have told; see `Failing`.
    """

    def __init__(
        self,
        native: _native.Group,
        engine: Engine,
        deadline: float,
        looking: Callable[[], Callable[[], None]],
    ) -> None:
        self._native = native
        self._looking = looking
        self._engine = engine
        self.deadline = deadline
        self._posted: dict[int, Posted] = {}

    @property
    def remaining(self) -> float:
        """Seconds to the deadline, for what has a timeout of its own."""
        return max(1e-3, self.deadline - time.monotonic())

    def send(self, data: memoryview, peer: int, tag: int = 0) -> Posted:
        """Post a send of at least one byte to a rank of the group."""
        try:
            return self._noted(Posted(self._engine.send(data, peer, tag), peer))
        except EngineError as error:
            raise Gone(peer, error) from None

    def recv(self, data: memoryview, peer: int, tag: int = 0) -> Posted:
        """Post a receive of at least one byte from a rank of the group."""
        try:
            return self._noted(Posted(self._engine.recv(data, peer, tag), peer))
        except EngineError as error:
            raise Gone(peer, error) from None

    def wait(self, *posted: Posted) -> None:
        """Block until all of them have ended."""
        for transfer, peer in posted:
            self._wait(transfer, peer)
            self._posted.pop(id(transfer), None)

    def settle(self) -> None:
        """After a failure: have nothing use memory any more that belongs to others from now on.

        Blocks until the engine has ended all that is under way, for some seconds at most.
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
            self._native.compose_waits(peer)
            look = self._looking()
            while not transfer.wait(_SLICE):
                look()
                if self._native.broken() is not None:
                    raise Broken
                if time.monotonic() >= self.deadline:
                    raise Late(peer)
            self._native.compose_waited(peer, time.monotonic() - began)
        except EngineError as error:
            raise Gone(peer, error) from None


def settle(transfers: Iterable[Transfer]) -> None:
    """Wait until transfers that are to fail have ended, well or not, for some seconds at most."""
    end = time.monotonic() + _SETTLE
    for transfer in transfers:
        with contextlib.suppress(EngineError):
            transfer.wait(max(0.0, end - time.monotonic()))


def bytes_at(address: int, size: int) -> memoryview:
    """Memory that somebody keeps alive, as bytes that can be written."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
