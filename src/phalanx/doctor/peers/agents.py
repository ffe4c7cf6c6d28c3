"""Agents: an interface that sends commands to a host, wherever the host is.

Commands and answers are JSON objects:

- `{"do": "open", "token": HEX}`: check this machine, and accept probes from connections that
  send the token. Answer: `name`, `findings`, `address`, `port`.
- `{"do": "measure", "address": ..., "port": ...}`: measure the link to a host that accepts probes.
  Answer: `latency`, `bandwidth`.
- `{"do": "memory", "peer": RANK, "first": BOOL}`: measure the link to a rank of this host. Answer:
  `latency`, `bandwidth`.

The `error` of an answer is the reason why the command failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from phalanx.doctor.peers.worker import Worker

__all__ = ["Agent", "LocalAgent"]


class Agent(ABC):
    """A sender of commands to one host or rank, one command at a time."""

    @abstractmethod
    def start(self, command: Mapping[str, Any]) -> None:
        """Send a command without waiting for its answer."""

    @abstractmethod
    def answer(self, seconds: float) -> dict[str, Any]:
        """Wait for the answer; return an `error` if none comes in time or the host is gone."""

    @abstractmethod
    def close(self) -> None:
        """Close the agent; no command may follow."""


class LocalAgent(Agent):
    """An agent that carries out commands in a thread of this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, "phalanx-doctor")
        self._pending: Future[dict[str, Any]] | None = None

    def start(self, command: Mapping[str, Any]) -> None:
        """Start a command in the thread."""
        self._pending = self._thread.submit(self._worker.execute, command)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Wait for the answer; return an `error` if there is none after `seconds`."""
        if self._pending is None:
            return {"error": "no command was sent"}
        try:
            return self._pending.result(seconds)
        except FutureTimeoutError:
            return {"error": f"no answer within {seconds:g} s"}

    def close(self) -> None:
        """Wait for the running command, then end the thread."""
        self._thread.shutdown()
        self._worker.close()
