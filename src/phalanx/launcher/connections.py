"""Connections of a launcher to other hosts, in a thread with an event loop."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = [
    "BUFFER_SIZE",
    "Connections",
    "close_writer",
    "enable_keepalive",
    "make_relay_socket_name",
    "set_user_timeout",
    "splice",
]

_USER_TIMEOUT_MILLISECONDS = 30_000
BUFFER_SIZE = 2**20
"""The maximum number of bytes read ahead on each connection."""


def make_relay_socket_name() -> str:
    """Return a random name for the Unix socket of this host's relay.

    The name is abstract ("@" stands for the byte 0), so no file can be left behind. Other users on
    this host can connect, which is no worse for the relay than a network socket.
    """
    return f"@phalanx-relay-{secrets.token_hex(16)}"


class Connections:
    """A thread with an event loop, and the connections that it serves.

    Args:
        name: The name of the thread.
        close_timeout: Seconds that connections have to end by themselves when `close` is called.
    """

    def __init__(self, name: str, close_timeout: float) -> None:
        self._close_timeout = close_timeout
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.base_events.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the thread and return its result; Ctrl-C cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Wait for connections to end, up to the limit, then close the remaining ones."""
        self.call(self._close_connections())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def serve(
        self,
        listener: socket.socket,
        handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None:
        """Run a task for each connection to `listener`; an error ends only its connection.

        Args:
            listener: The listening socket, taken over by the server.
            handle: The coroutine function that handles one connection.
        """

        async def run_handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await handle(reader, writer)
            except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
                pass  # the peer sees that the connection ends
            finally:
                self._tasks.discard(task)
                close_writer(writer)

        unix = listener.family == socket.AF_UNIX
        start = asyncio.start_unix_server if unix else asyncio.start_server
        self._servers.append(await start(run_handler, sock=listener, limit=BUFFER_SIZE))

    async def _close_connections(self) -> None:
        for server in self._servers:
            server.close()
        if self._tasks:
            _, remaining = await asyncio.wait(self._tasks, timeout=self._close_timeout)
            for task in remaining:
                task.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)


async def splice(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Forward data between two connections in both directions until both have ended."""
    try:
        await asyncio.gather(_copy(one[0], other[1]), _copy(other[0], one[1]))
    finally:
        for _, writer in (one, other):
            close_writer(writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(BUFFER_SIZE):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def close_writer(writer: asyncio.StreamWriter) -> None:
    """Close a connection; data already written is still sent."""
    writer.close()


def enable_keepalive(writer: asyncio.StreamWriter) -> None:
    """Enable keep-alive, so that the loss of the peer is detected within half a minute."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def set_user_timeout(writer: asyncio.StreamWriter) -> None:
    """Detect the loss of the peer within half a minute even while an acknowledgement is pending.

    Keep-alive is inactive then, and the kernel would retry for a quarter of an hour. Use it only if
    both ends always read: it also ends a connection whose reader pauses for longer.
    """
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MILLISECONDS)
