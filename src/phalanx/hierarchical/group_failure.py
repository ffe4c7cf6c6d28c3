"""The reason why a group broke, shared once with all ranks through the group's store.

A rank that detects a failure reports it before it closes its connections. Peers that find their
connections closed can then look up the reason. The first report wins, so all ranks raise the same
error. The store may be lost with its host, so every request to it has a short limit.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import DistError

from phalanx.transports.shutdown_hooks import delay_shutdown

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

__all__ = ["EXITED", "GroupFailure", "SharedGroupState"]

_FAILURE_KEY = "phalanx/broken"
_QUERY_TIMEOUT = 1.0
"""Seconds that the store has to answer a request."""
_RETRY_PAUSE = 5.0
"""Seconds without requests after an unanswered one: the link to the store may be severed."""
_REPORT_GRACE = 0.25
"""Seconds to wait for the reason of a closed connection, which another rank may report."""
_POLL_INTERVAL = 0.005
EXITED = "*"
"""The value in place of the call site at which a rank left, if its process has exited."""


class GroupFailure(NamedTuple):
    """The failure that broke a group, as described by the rank that detected it."""

    code: str
    """The code of the failure, as in a native status."""
    message: str
    reporter: int
    peer: int = -1
    error: int = 0


class SharedGroupState:
    """The state of a group that its ranks share in the store: its failure, and the ranks that left.

    Args:
        store: The group's store. Keys begin with "phalanx/".
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._failure: GroupFailure | None = None
        self._retry_at = 0.0

    def report(self, failure: GroupFailure) -> GroupFailure:
        """Report a failure of the group, and return the failure that was reported first."""
        if self._failure is None:
            text = json.dumps(failure)
            stored = self._query(lambda: self._store.compare_set(_FAILURE_KEY, "", text))
            self._failure = _parse(stored) or failure
        return self._failure

    def wait_for_failure(self) -> GroupFailure | None:
        """Return the failure of the group, or None; wait up to 0.25 s for a report."""
        end = time.monotonic() + _REPORT_GRACE
        while self._failure is None:
            if self._query(lambda: self._store.check([_FAILURE_KEY])):
                self._failure = _parse(self._query(lambda: self._store.get(_FAILURE_KEY)))
            elif time.monotonic() >= end:
                break
            time.sleep(_POLL_INTERVAL)
        return self._failure

    def check_failure(self) -> GroupFailure | None:
        """Return the failure of the group, or None; check the store only once."""
        if self._failure is None and self._query(lambda: self._store.check([_FAILURE_KEY])):
            self._failure = _parse(self._query(lambda: self._store.get(_FAILURE_KEY)))
        return self._failure

    def record_leave(self, rank: int, site: str) -> None:
        """Record that a rank leaves the group, with the call site."""
        self._query(lambda: self._store.set(_leave_key(rank), site or "-"))

    def record_exit(self, rank: int) -> None:
        """Record that a rank's process exits normally without having left the group."""
        self._query(lambda: self._store.set(_leave_key(rank), EXITED))

    def leave_site(self, rank: int) -> str | None:
        """Return the call site at which a rank left the group.

        Returns None if the rank has not left, an empty text if the call site is unknown, and
        `EXITED` if its process has exited.
        """
        if not self._query(lambda: self._store.check([_leave_key(rank)])):
            return None
        answer = self._query(lambda: self._store.get(_leave_key(rank)))
        site = answer.decode() if answer else ""
        return "" if site == "-" else site

    def _query(self, request: Callable[[], Any]) -> Any:
        """Return the store's answer; None if it does not answer in time."""
        if time.monotonic() < self._retry_at:
            return None
        answer: list[Any] = []

        def run() -> None:
            with delay_shutdown():
                try:
                    answer.append(request())
                except (DistError, RuntimeError):  # the store is gone
                    answer.append(None)

        thread = threading.Thread(target=run, name="phalanx-store-query", daemon=True)
        thread.start()
        thread.join(_QUERY_TIMEOUT)
        if not answer:
            self._retry_at = time.monotonic() + _RETRY_PAUSE
            return None
        return answer[0]


def _leave_key(rank: int) -> str:
    return f"phalanx/left/{rank}"


def _parse(text: bytes | None) -> GroupFailure | None:
    return GroupFailure(*json.loads(text)) if text else None
