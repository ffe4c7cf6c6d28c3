"""The only port of a job that other hosts can reach; connections without the key are rejected.

The services that the hosts share listen where only this machine can reach them: the stores of the
launchers and ranks on the loopback interface, the relay of the ranks on a Unix socket. The tunnel
server listens on the interface that faces the other hosts. It authenticates each client by the
job's key (`handshake`) and only then connects it to the requested service. `TunnelClient` is the
other end, on the other hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

from phalanx.launcher.connections import (
    BUFFER_SIZE,
    Connections,
    enable_keepalive,
    make_relay_socket_name,
    set_user_timeout,
    splice,
)
from phalanx.launcher.handshake import HandshakeError, authenticate_client, send_reply
from phalanx.launcher.store import HOST, AttemptStores

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TunnelServer"]

_HANDSHAKE_SECONDS = 10.0
_MAX_PENDING = 512
"""The maximum number of concurrent handshakes. A further connection replaces the oldest one from
the address that has the most."""
_MAX_NOTICES = 16
_CLOSE_TIMEOUT = 2.0
"""Seconds for which connections stay open at the end, since other hosts may need the store."""


class TunnelServer:
    """A server that admits the hosts of a job and connects them to its services.

    Args:
        address: The IP address to listen on.
        port: The TCP port to listen on.
        key: The job's key; empty if it has none.
        store_port: The port of the launchers' store, on the loopback interface.
        check: A function that returns why a client with this hello is rejected; empty if it is not.
        notify: A function that shows a sentence to the user when a connection is rejected.

    Raises:
        OSError: The server cannot listen on this address and port.
    """

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        store_port: int,
        check: Callable[[dict[str, Any]], str],
        notify: Callable[[str], None],
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=512)
        self._key = key
        self._store_port = store_port
        self._check = check
        self._notify = notify
        self._notified_peers: set[str] = set()
        self.rejection = ""
        """The reason for which the last host with the key was rejected; empty if none was."""
        self._pending: dict[asyncio.Task[Any], str] = {}
        self._hosts: dict[int, str] = {}
        self.on_host_lost: Callable[[str, str], None] = lambda *_: None
        """A function called for each host that leaves, with its unique name and one for people."""
        self.rank_stores = AttemptStores()
        """The stores of the ranks."""
        self._connections = Connections("phalanx-tunnel", _CLOSE_TIMEOUT)
        self.relay_socket = make_relay_socket_name()
        """The name of the Unix socket on which the ranks' relay must listen."""
        self._connections.call(self._connections.serve(listener, self._serve))

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._connections.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        enable_keepalive(writer)
        peer = str(writer.get_extra_info("peername", ("?",))[0])
        handshake = asyncio.ensure_future(authenticate_client(reader, writer, self._key))
        self._pending[handshake] = peer
        if len(self._pending) > _MAX_PENDING:
            self._cancel_oldest_handshake()
        try:
            hello = await asyncio.wait_for(handshake, _HANDSHAKE_SECONDS)
        except HandshakeError as error:
            self._reject(peer, str(error))
            return
        finally:
            self._pending.pop(handshake, None)
        if reason := self._check(hello):
            self.rejection = reason
            self._reject(peer, reason)
            send_reply(writer, reason)
            return
        await self._forward_to_service(reader, writer, peer, hello)

    async def _forward_to_service(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        hello: dict[str, Any],
    ) -> None:
        service = hello.get("service")
        if service in ("join", "store", "ranks"):  # a reader behind the relay may pause
            set_user_timeout(writer)
        if service == "join":
            await self._join(reader, writer, peer, hello)
        elif service == "store":
            await self._forward_to_port(reader, writer, self._store_port)
        elif service == "ranks":
            await self._forward_to_rank_store(reader, writer, hello.get("attempt"))
        elif service == "relay":
            service_streams = await asyncio.open_unix_connection(
                self.relay_socket.replace("@", "\0"), limit=BUFFER_SIZE
            )
            send_reply(writer, "")
            await splice((reader, writer), service_streams)
        else:
            send_reply(writer, f"unknown service {service!r}")

    async def _forward_to_rank_store(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attempt: object
    ) -> None:
        """Connect a rank to the store of its attempt.

        The attempt is needed because the ranks of several hosts do not start at the same time.
        """
        try:
            if not isinstance(attempt, int) or attempt < 0:
                raise LookupError(f"invalid attempt {attempt!r}")
            port = self.rank_stores.port(attempt)
        except LookupError as error:
            send_reply(writer, str(error))
            return
        await self._forward_to_port(reader, writer, port)

    async def _forward_to_port(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        service_streams = await asyncio.open_connection(HOST, port, limit=BUFFER_SIZE)
        send_reply(writer, "")
        await splice((reader, writer), service_streams)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        hello: dict[str, Any],
    ) -> None:
        """Admit a host to the job; its number is reserved for the lifetime of the connection."""
        number = hello.get("number")
        if not isinstance(number, int) or number < 0:  # the rendezvous assigns the numbers
            number = None
        elif number == 0 or number in self._hosts:
            reason = (
                f"host number {number} is taken by "
                f"{self._hosts.get(number, 'the host of the rendezvous')}: give each host its own "
                "--node-rank"
            )
            self._reject(peer, reason)
            send_reply(writer, reason)
            return
        else:
            self._hosts[number] = peer
        try:
            send_reply(writer, "")
            with contextlib.suppress(OSError):
                await reader.read()
            self.on_host_lost(str(hello.get("id")), str(hello.get("name")))
        finally:
            if number is not None:
                del self._hosts[number]

    def _cancel_oldest_handshake(self) -> None:
        """Cancel the oldest handshake from the address that has the most.

        A flood from one address therefore displaces its own connections, not the job's hosts.
        """
        busiest = Counter(self._pending.values()).most_common(1)[0][0]
        oldest = next(task for task, peer in self._pending.items() if peer == busiest)
        del self._pending[oldest]  # at once: more may arrive before the task has ended
        oldest.cancel()

    def _reject(self, peer: str, reason: str) -> None:
        if len(self._notified_peers) < _MAX_NOTICES and peer not in self._notified_peers:
            self._notified_peers.add(peer)
            self._notify(f"rejected {peer}: {reason}")
