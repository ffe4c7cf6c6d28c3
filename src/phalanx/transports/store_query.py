"""Requests to a store whose host may be lost, or not respond."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import DistError

from phalanx.transports.shutdown_hooks import delay_shutdown

_Answer = TypeVar("_Answer")

TIMEOUT = 1.0
"""Seconds that a store has to answer a request."""


class StoreLost(Exception):  # noqa: N818 - a state of the store, for callers that go on without it
    """The store is gone, or did not answer in time."""


def query_store(request: Callable[[], _Answer]) -> _Answer:
    """Return the store's answer to a request; blocks for at most `TIMEOUT` seconds.

    The request runs in a thread of its own, since a store has one timeout for all its requests. The
    thread remains until the store answers or the connection ends.

    Raises:
        StoreLost: The store is gone, or did not answer in time.
    """
    answer: list[_Answer] = []

    def run() -> None:
        with delay_shutdown(), contextlib.suppress(DistError, RuntimeError):
            answer.append(request())

    thread = threading.Thread(target=run, name="phalanx-store-query", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    if not answer:
        raise StoreLost
    return answer[0]
