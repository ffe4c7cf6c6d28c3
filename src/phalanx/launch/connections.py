"""Connections between hosts that a launcher carries on, in a thread with an event loop."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["BUFFER", "Connections", "drop", "keep_alive", "limit_silence", "relay_name", "splice"]

_SILENCE_MILLISECONDS = 30_000
BUFFER = 2**20
"""Bytes that are read ahead, at most, on each connection."""


def relay_name() -> str:
    """A name for the socket of this host's relay.

    It is an abstract one ("@" stands for the byte 0): there is no file that could be left behind.
    Others on this host may connect, which the relay doesn't mind more than on a network.
    """
    return f"@phalanx-relay-{secrets.token_hex(16)}"


class Connections:
    """A thread with an event loop, and the connections that it has under way.

    Args:
        name: The thread's.
        settle: Seconds that connections have to end by themselves, at the end.
    """

    def __init__(self, name: str, settle: float) -> None:
        self._settle = settle
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.base_events.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it there, and wait for it; Ctrl-C ends it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Let connections end that are about to, then end all."""
        self.call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def serve(
        self,
        listener: socket.socket,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None:
        """Have a task for each who connects to `listener`; errors of a connection end it."""

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await serve(reader, writer)
            except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
                pass  # whoever is at the other end knows
            finally:
                self._tasks.discard(task)
                drop(writer)

        unix = listener.family == socket.AF_UNIX
        start = asyncio.start_unix_server if unix else asyncio.start_server
        self._servers.append(await start(accepted, sock=listener, limit=BUFFER))

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=self._settle)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


async def splice(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Carry what comes on each of two connections to the other one, until both have ended."""
    try:
        await asyncio.gather(_carry(one[0], other[1]), _carry(other[0], one[1]))
    finally:
        for _, writer in (one, other):
            drop(writer)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(BUFFER):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def drop(writer: asyncio.StreamWriter) -> None:
    """Close a connection; what it has been given is still sent."""
    writer.close()


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have a connection whose other end has vanished found in half a minute."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def limit_silence(writer: asyncio.StreamWriter) -> None:
    """Have a vanished other end found in half a minute also while it owes an acknowledgement.

    Keep-alive rests then, and the kernel would try again for a quarter of an hour. For connections
    whose ends always read: this ends one whose reader pauses for longer, too.
    """
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MILLISECONDS)
