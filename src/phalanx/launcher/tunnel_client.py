"""Forwarding of local connections through the gate of another host.

The launcher and the ranks of this host connect to it to reach their stores, and the ranks to reach
the relay. It forwards each connection to the corresponding service behind the gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from phalanx.errors import LaunchError
from phalanx.launcher.connections import (
    BUFFER,
    Connections,
    drop,
    keep_alive,
    limit_silence,
    relay_name,
    splice,
)
from phalanx.launcher.handshake import Refused, as_guest
from phalanx.launcher.store import HOST

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Way"]

_HANDSHAKE_SECONDS = 10.0
_AGAIN_SECONDS = 0.25
_NEXT_ADDRESS_SECONDS = 0.25
"""Seconds before the next address of a host name is tried in parallel."""
_TELL_SECONDS = 5.0
_SETTLE_SECONDS = 0.3
_TRIES = 4


class Way:
    """A forwarder of this host's connections through the gate of another host.

    Args:
        host: The name or address of the gate's host.
        port: The port of the gate.
        key: The job's key; empty if it has none.
        hello: The description of this host, which the gate's host checks.
        tell: A function that shows a sentence to the user if the gate is unreachable for long.
    """

    def __init__(
        self, host: str, port: int, key: bytes, hello: dict[str, Any], tell: Callable[[str], None]
    ) -> None:
        self._host, self._port, self._key, self._hello = host, port, key, hello
        self._tell = tell
        self._joined: asyncio.StreamWriter | None = None
        self.port = 0
        """The port on this host's loopback interface that leads to the launchers' store."""
        self.ranks_port = 0
        """The port on this host's loopback interface that leads to the ranks' store."""
        self.attempt = 0
        """The attempt to whose store the ranks are connected."""
        self._connections = Connections("phalanx-way", _SETTLE_SECONDS)
        self.relay = relay_name()
        """The name of the Unix socket that leads to the relay."""

    def enter(self, seconds: float) -> None:
        """Join the job and start to forward connections; block until the gate is reachable.

        Args:
            seconds: The limit of the wait, in seconds.

        Raises:
            LaunchError: The gate was not reachable in time, or rejects this host.
        """
        self._connections.call(self._enter(seconds))

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._joined is not None:
            self._connections.call(self._leave(self._joined))
        self._connections.close()

    async def _leave(self, joined: asyncio.StreamWriter) -> None:
        drop(joined)

    async def _enter(self, seconds: float) -> None:
        end, tell = time.monotonic() + seconds, time.monotonic() + _TELL_SECONDS
        while True:
            try:
                _, self._joined = await self._through("join")
                break
            except Refused as refused:
                raise LaunchError(f"{self._place} doesn't let this host in: {refused}") from None
            except UnicodeError:
                raise LaunchError(f"{self._place} is no place: {self._host!r} is no name") from None
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                reason = _reason(error)
            if time.monotonic() > end:
                raise LaunchError(
                    f"{self._place} can't be reached for {seconds:g} s ({reason}): is `phalanx "
                    "run` of host 0 running there, and does a firewall let this host in?"
                )
            if time.monotonic() > tell:
                tell = float("inf")
                self._tell(f"waiting for {self._place} ({reason})")
            await asyncio.sleep(_AGAIN_SECONDS)
        store, ranks = (socket.create_server((HOST, 0), backlog=512) for _ in range(2))
        self.port, self.ranks_port = store.getsockname()[1], ranks.getsockname()[1]
        relay = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        relay.bind(self.relay.replace("@", "\0"))
        for listener, service in ((store, "store"), (ranks, "ranks"), (relay, "relay")):
            await self._connections.serve(listener, self._leading(service))

    @property
    def _place(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def _leading(
        self, service: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(Refused):  # the gate reports it, and this end is closed
                await splice((reader, writer), await self._through_again(service))

        return lead

    async def _through_again(
        self, service: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a service behind the gate, with retries.

        The gate knows this host. If it drops a handshake, it has too many in progress.
        """
        for _ in range(_TRIES - 1):
            try:
                return await self._through(service)
            except asyncio.TimeoutError:  # the timeout is long enough
                raise
            except (OSError, EOFError):
                await asyncio.sleep(_AGAIN_SECONDS)
        return await self._through(service)

    async def _through(self, service: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to a service behind the gate."""
        connecting = asyncio.open_connection(
            self._host, self._port, limit=BUFFER, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS
        )
        reader, writer = await asyncio.wait_for(connecting, _HANDSHAKE_SECONDS)
        try:
            keep_alive(writer)
            if service != "relay":  # a reader behind the relay may pause
                limit_silence(writer)
            hello = {**self._hello, "service": service}
            if service == "ranks":
                hello["attempt"] = self.attempt
            greeting = as_guest(reader, writer, self._key, hello)
            await asyncio.wait_for(greeting, _HANDSHAKE_SECONDS)
        except BaseException:
            drop(writer)
            raise
        return reader, writer


def _reason(error: Exception) -> str:
    """Return the system's text for a connection error; asyncio's texts are for programmers."""
    number = getattr(error, "errno", None) or 0
    if number > 0:
        return os.strerror(number)
    return getattr(error, "strerror", None) or "it doesn't answer"
