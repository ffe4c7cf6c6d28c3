"""Forwarding of local connections to the tunnel server on another host.

The launcher and the ranks of this host connect to it to reach their stores, and the ranks to reach
the relay. It forwards each connection to the corresponding service behind the server.
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
    BUFFER_SIZE,
    Connections,
    close_writer,
    enable_keepalive,
    make_relay_socket_name,
    set_user_timeout,
    splice,
)
from phalanx.launcher.handshake import RejectedError, authenticate_to_server
from phalanx.launcher.store import HOST

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["TunnelClient"]

_HANDSHAKE_SECONDS = 10.0
_RETRY_SECONDS = 0.25
_NEXT_ADDRESS_SECONDS = 0.25
"""Seconds before the next address of a host name is tried in parallel."""
_NOTICE_SECONDS = 5.0
_CLOSE_TIMEOUT = 0.3
_MAX_TRIES = 4


class TunnelClient:
    """A forwarder of this host's connections to the tunnel server on another host.

    Args:
        host: The name or address of the server's host.
        port: The port of the server.
        key: The job's key; empty if it has none.
        hello: The description of this host, which the server checks.
        notify: A function that shows a sentence to the user if the server is unreachable for long.
    """

    def __init__(
        self, host: str, port: int, key: bytes, hello: dict[str, Any], notify: Callable[[str], None]
    ) -> None:
        self._host, self._port, self._key, self._hello = host, port, key, hello
        self._notify = notify
        self._membership: asyncio.StreamWriter | None = None
        self.store_port = 0
        """The port on this host's loopback interface that leads to the launchers' store."""
        self.rank_store_port = 0
        """The port on this host's loopback interface that leads to the ranks' store."""
        self.attempt = 0
        """The attempt to whose store the ranks are connected."""
        self._connections = Connections("phalanx-tunnel", _CLOSE_TIMEOUT)
        self.relay_socket = make_relay_socket_name()
        """The name of the Unix socket that leads to the relay."""

    def connect(self, seconds: float) -> None:
        """Join the job and start to forward connections; block until the server is reachable.

        Args:
            seconds: The limit of the wait, in seconds.

        Raises:
            LaunchError: The server was not reachable in time, or rejects this host.
        """
        self._connections.call(self._connect(seconds))

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._membership is not None:
            self._connections.call(self._close_membership(self._membership))
        self._connections.close()

    async def _close_membership(self, writer: asyncio.StreamWriter) -> None:
        close_writer(writer)

    async def _connect(self, seconds: float) -> None:
        end, notice_time = time.monotonic() + seconds, time.monotonic() + _NOTICE_SECONDS
        while True:
            try:
                _, self._membership = await self._open_service("join")
                break
            except RejectedError as rejection:
                raise LaunchError(f"can't join the job at {self._server}: {rejection}") from None
            except UnicodeError:
                raise LaunchError(
                    f"invalid endpoint {self._server}: bad host name {self._host!r}"
                ) from None
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                reason = _reason(error)
            if time.monotonic() > end:
                raise LaunchError(
                    f"{self._server} was not reachable for {seconds:g} s ({reason}): check that "
                    "`phalanx run` of host 0 is running there and that no firewall blocks this "
                    "host"
                )
            if time.monotonic() > notice_time:
                notice_time = float("inf")
                self._notify(f"waiting for {self._server} ({reason})")
            await asyncio.sleep(_RETRY_SECONDS)
        store, ranks = (socket.create_server((HOST, 0), backlog=512) for _ in range(2))
        self.store_port, self.rank_store_port = store.getsockname()[1], ranks.getsockname()[1]
        relay = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        relay.bind(self.relay_socket.replace("@", "\0"))
        for listener, service in ((store, "store"), (ranks, "ranks"), (relay, "relay")):
            await self._connections.serve(listener, self._make_forwarder(service))

    @property
    def _server(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def _make_forwarder(
        self, service: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(RejectedError):  # the server reports it
                await splice((reader, writer), await self._open_service_with_retries(service))

        return forward

    async def _open_service_with_retries(
        self, service: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a service behind the server, with retries.

        The server knows this host. If it drops a handshake, it has too many in progress.
        """
        for _ in range(_MAX_TRIES - 1):
            try:
                return await self._open_service(service)
            except asyncio.TimeoutError:  # the timeout is long enough
                raise
            except (OSError, EOFError):
                await asyncio.sleep(_RETRY_SECONDS)
        return await self._open_service(service)

    async def _open_service(
        self, service: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to a service behind the server."""
        connecting = asyncio.open_connection(
            self._host, self._port, limit=BUFFER_SIZE, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS
        )
        reader, writer = await asyncio.wait_for(connecting, _HANDSHAKE_SECONDS)
        try:
            enable_keepalive(writer)
            if service != "relay":  # a reader behind the relay may pause
                set_user_timeout(writer)
            hello = {**self._hello, "service": service}
            if service == "ranks":
                hello["attempt"] = self.attempt
            handshake = authenticate_to_server(reader, writer, self._key, hello)
            await asyncio.wait_for(handshake, _HANDSHAKE_SECONDS)
        except BaseException:
            close_writer(writer)
            raise
        return reader, writer


def _reason(error: Exception) -> str:
    """Return the system's text for a connection error; asyncio's texts are for programmers."""
    number = getattr(error, "errno", None) or 0
    if number > 0:
        return os.strerror(number)
    return getattr(error, "strerror", None) or "no answer"
