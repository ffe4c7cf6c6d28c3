"""The bytes that this process exchanges with each other host, for `phalanx watch`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from phalanx import _native

_WINDOW_NANOSECONDS = 2_000_000_000
"""The time over which readers of the flight recorder measure the bandwidth; up to twice of it."""

_Bytes = tuple[int, int, int]
"""Bytes sent, bytes received, and the time in nanoseconds of the monotonic clock."""


class _Link:
    """The link to a host, which all groups of this process share.

    Args:
        host: The name of the host.
    """

    def __init__(self, host: str) -> None:
        self._number = _native.add_link(host)
        self._lock = threading.Lock()
        self._sent = self._received = 0
        start: _Bytes = 0, 0, time.monotonic_ns()
        self._earlier, self._last, self._now = start, start, start

    def count(self, sent: int, received: int, begun_at: int) -> None:
        with self._lock:
            if begun_at - self._now[2] > _WINDOW_NANOSECONDS:  # the link was idle
                self._earlier = self._last = *self._now[:2], begun_at
            self._sent += sent
            self._received += received
            self._now = now = self._sent, self._received, time.monotonic_ns()
            if now[2] - self._last[2] > _WINDOW_NANOSECONDS:
                self._earlier, self._last = self._last, now
            _native.record_link(self._number, now, self._earlier)


_links: dict[str, _Link] = {}
os.register_at_fork(after_in_child=_links.clear)  # they are in the recorder of the parent


class Links:
    """The links between the hosts of a group, as one rank uses them.

    Args:
        hosts: The name of each rank's host; empty for this rank's own.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._links = [
            (_links.get(host) or _links.setdefault(host, _Link(host))) if host else None
            for host in hosts
        ]

    def count(self, peer: int, sent: int, received: int, begun_at: int) -> None:
        """Count the bytes of a completed transfer with a rank.

        Args:
            peer: The rank.
            sent: The bytes sent.
            received: The bytes received.
            begun_at: The time in nanoseconds of the monotonic clock.
        """
        link = self._links[peer]
        if link is not None:
            link.count(sent, received, begun_at)
