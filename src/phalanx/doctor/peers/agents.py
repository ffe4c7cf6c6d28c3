"""How a host is asked to do something, wherever it is.

A command is an object of JSON, and so is its answer:

- `{"do": "open", "token": HEX}`: look at this machine, and answer whoever knows the token. Answer:
  `name`, `findings`, `address`, `port`.
- `{"do": "measure", "address": ..., "port": ...}`: the way to a host that has been opened. Answer:
  `latency`, `bandwidth`.
- `{"do": "memory", "peer": RANK, "first": BOOL}`: the same with a rank of this host.

An answer with `error` says why there is nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from phalanx.doctor.peers.worker import Worker

__all__ = ["Agent", "LocalAgent"]


class Agent(ABC):
    """Somebody who can be asked, for one thing at a time."""

    @abstractmethod
    def start(self, command: Mapping[str, Any]) -> None:
        """Ask; doesn't wait."""

    @abstractmethod
    def answer(self, seconds: float) -> dict[str, Any]:
        """What it answers; an `error` if it hasn't within that time, or is gone."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more will be asked."""


class LocalAgent(Agent):
    """This process itself, in a thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, "phalanx-doctor")
        self._under_way: Future[dict[str, Any]] | None = None

    def start(self, command: Mapping[str, Any]) -> None:
        """Ask; doesn't wait."""
        self._under_way = self._thread.submit(self._worker.do, command)

    def answer(self, seconds: float) -> dict[str, Any]:
        """What came of it; an `error` if nothing has within that time."""
        if self._under_way is None:
            return {"error": "nothing was asked"}
        try:
            return self._under_way.result(seconds)
        except Late:
            return {"error": f"no answer within {seconds:g} s"}

    def close(self) -> None:
        """End the thread, when it has done what it was asked."""
        self._thread.shutdown()
        self._worker.close()
