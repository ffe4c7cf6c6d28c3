"""Commands to hosts: the agents that send them, wherever the host is, and the worker on each host.

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

import socket
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

from phalanx import env
from phalanx.doctor import run_checks
from phalanx.doctor.peers.probes import ProbeServer, UnreachableError, measure, measure_memory
from phalanx.errors import PhalanxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future


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


class Worker:
    """An executor of commands; a failure becomes the "error" of the answer.

    Args:
        address: Function that returns the address at which to listen for other hosts.
    """

    def __init__(self, address: Callable[[], str]) -> None:
        self._address = address
        self._token = b""
        self._probe_server: ProbeServer | None = None

    def execute(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a command as described in this module's docstring, and return its answer."""
        try:
            return self._execute(command)
        except (OSError, SubprocessError, UnreachableError, PhalanxError, UsageError) as error:
            return {"error": str(error)}

    def close(self) -> None:
        """Stop serving measurements."""
        if self._probe_server is not None:
            self._probe_server.close()
            self._probe_server = None

    def _execute(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if command["do"] == "open":
            return self._open(bytes.fromhex(command["token"]))
        if command["do"] == "measure":
            return measure(command["address"], command["port"], self._token)._asdict()
        return measure_memory(command["peer"], first=command["first"])._asdict()

    def _open(self, token: bytes) -> dict[str, Any]:
        description: dict[str, Any] = {
            "name": env.host_id() or socket.gethostname(),
            "findings": [asdict(finding) for finding in run_checks()],
        }
        address = self._address()
        if not address:
            return {**description, "error": "it has no address other than the loopback address"}
        self._token = token
        self._probe_server = ProbeServer(address, token)
        return {**description, "address": address, "port": self._probe_server.port}


class LocalAgent(Agent):
    """An agent that carries out commands in a thread of this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, "phalanx-doctor")
        self._pending: Future[dict[str, Any]]

    def start(self, command: Mapping[str, Any]) -> None:
        """Start a command in the thread."""
        self._pending = self._thread.submit(self._worker.execute, command)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Wait for the answer; return an `error` if there is none after `seconds`."""
        try:
            return self._pending.result(seconds)
        except FutureTimeoutError:
            return {"error": f"no answer within {seconds:g} s"}

    def close(self) -> None:
        """Wait for the running command, then end the thread."""
        self._thread.shutdown()
        self._worker.close()
