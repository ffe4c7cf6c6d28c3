"""The worker of a host: it serves measurements from other hosts, and measures on command."""

from __future__ import annotations

import socket
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

from phalanx import env
from phalanx.doctor.checks import run_checks
from phalanx.doctor.peers.tcp_probe import ProbeServer, UnreachableError, measure
from phalanx.errors import PhalanxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Worker"]


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
        """Carry out a command as described in `agents`, and return its answer."""
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
        from phalanx.doctor.peers.memory import exchange

        return exchange(command["peer"], first=command["first"])._asdict()

    def _open(self, token: bytes) -> dict[str, Any]:
        findings = [finding.as_json() for finding in run_checks()]
        description: dict[str, Any] = {
            "name": env.host_id() or socket.gethostname(),
            "findings": findings,
        }
        address = self._address()
        if not address:
            return {**description, "error": "it has no address other than the loopback address"}
        self._token = token
        self._probe_server = ProbeServer(address, token)
        return {**description, "address": address, "port": self._probe_server.port}
