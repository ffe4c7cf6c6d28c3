"""Tunnels between the hosts of a job, through the only port that other hosts can reach.

The services that the hosts share listen where only their own machine can reach them: the stores of
the launchers and ranks on the loopback interface, the relay of the ranks on a Unix socket. The
tunnel server listens on the interface that faces the other hosts. It authenticates each client by
the job's key (`phalanx.system.authentication`). Then the client sends a hello with its description
and the service that it requests, and the server replies with an error or an empty text. After that
the connection belongs to the requested service, and is encrypted if the job has a key
(`tunnel_encryption`; the relay encrypts by itself). Connections without the key are rejected.

The tunnel client is the other end, on the other hosts. The launcher and the ranks of its host
connect to it as if it were their stores and the relay. It forwards each connection to the
corresponding service behind the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.errors import LaunchError
from phalanx.key import derive
from phalanx.launcher.store import HOST, AttemptStores
from phalanx.launcher.tunnel_encryption import encrypt, make_context
from phalanx.system.authentication import (
    AuthenticationError,
    Handshake,
    ProtocolMismatch,
    WrongKey,
)

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter
    from collections.abc import Awaitable, Callable, Coroutine

    _Stream = tuple[StreamReader, StreamWriter]

_PROTOCOL = b"phalanx tunnel 3\n"
_MAX_HELLO_BYTES = 4096
"""The maximum size of a hello, in bytes."""
_HANDSHAKE_SECONDS = 10.0
_MAX_PENDING = 512
"""The maximum number of concurrent handshakes. A further connection replaces the oldest one from
the address that has the most."""
_MAX_NOTICES = 16
_SERVER_CLOSE_TIMEOUT = 2.0
"""Seconds for which connections stay open at the end, since other hosts may need the store."""
_RETRY_SECONDS = 0.25
_NEXT_ADDRESS_SECONDS = 0.25
"""Seconds before the next address of a host name is tried in parallel."""
_NOTICE_SECONDS = 5.0
_CLIENT_CLOSE_TIMEOUT = 0.3
_MAX_TRIES = 4
_USER_TIMEOUT_MILLISECONDS = 30_000
_BUFFER_SIZE = 2**20
"""The maximum number of bytes read ahead on each connection."""


class _Tunnel:
    """One end of the tunnel: a thread with an event loop, and the connections that it serves.

    Args:
        close_timeout: Seconds that connections have to end by themselves when `close` is called.
    """

    rejection = ""
    """The reason for which the last host with the key was rejected; empty if none was."""

    def __init__(self, close_timeout: float) -> None:
        # The name is abstract ("@" stands for the byte 0), so no file can be left behind. Other
        # users on this host can connect, which is no worse for the relay than a network socket.
        self.relay_socket = f"@phalanx-relay-{secrets.token_hex(16)}"
        """The name of the Unix socket of the ranks' relay on this host."""
        self._close_timeout = close_timeout
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.base_events.Server] = []
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="phalanx-tunnel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; wait for connections to end, up to the limit, then close the others."""
        self._call(self._close_connections())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the thread and return its result; Ctrl-C cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _listen(
        self, listener: socket.socket, handle: Callable[..., Awaitable[None]]
    ) -> None:
        """Run `handle` for each connection to `listener`; an error ends only its connection."""

        async def run_handler(reader: StreamReader, writer: StreamWriter) -> None:
            task: Any = asyncio.current_task()
            self._tasks.add(task)
            try:
                await handle(reader, writer)
            except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
                pass  # the peer sees that the connection ends
            finally:
                self._tasks.discard(task)
                writer.close()

        unix = listener.family == socket.AF_UNIX
        start = asyncio.start_unix_server if unix else asyncio.start_server
        self._servers.append(await start(run_handler, sock=listener, limit=_BUFFER_SIZE))

    async def _close_connections(self) -> None:
        for server in self._servers:
            server.close()
        if self._tasks:
            _, remaining = await asyncio.wait(self._tasks, timeout=self._close_timeout)
            for task in remaining:
                task.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)


class TunnelServer(_Tunnel):
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
        super().__init__(_SERVER_CLOSE_TIMEOUT)
        self._key = key
        self._encryption = make_context(key, is_server=True) if key else None
        self._store_port = store_port
        self._check = check
        self._notify = notify
        self._notified_peers: set[str] = set()
        self._pending: dict[asyncio.Task[Any], str] = {}
        self._hosts: dict[int, str] = {}
        self.on_host_lost: Callable[[str, str], None] = lambda *_: None
        """A function called for each host that leaves, with its unique name and one for people."""
        self.rank_store_port = AttemptStores().port
        """A function that returns the port of the ranks' store of an attempt."""
        self._call(self._listen(listener, self._serve))

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        _enable_keepalive(writer)
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
        service = hello.get("service")
        if service != "relay":  # a reader behind the relay may pause
            _set_user_timeout(writer)
        if service == "join":
            await self._join(reader, writer, peer, hello)
            return
        try:
            target = await self._open_target(service, hello.get("attempt"))
        except LookupError as error:
            send_reply(writer, str(error))
            return
        await self._accept(writer, service)
        await _splice((reader, writer), target)

    async def _accept(self, writer: StreamWriter, service: object) -> None:
        send_reply(writer, "")
        if self._encryption is not None and service != "relay":
            handshake = encrypt(writer, self._encryption, is_server=True)
            await asyncio.wait_for(handshake, _HANDSHAKE_SECONDS)

    async def _open_target(self, service: object, attempt: object) -> _Stream:
        """Connect to a service on this host; raise `LookupError` if there is none.

        The ranks' store depends on the attempt: ranks of several hosts do not start together.
        """
        if service == "relay":
            name = self.relay_socket.replace("@", "\0")
            return await asyncio.open_unix_connection(name, limit=_BUFFER_SIZE)
        if service == "store":
            port = self._store_port
        elif service != "ranks":
            raise LookupError(f"unknown service {service!r}")
        elif isinstance(attempt, int) and attempt >= 0:
            port = self.rank_store_port(attempt)
        else:
            raise LookupError(f"invalid attempt {attempt!r}")
        return await asyncio.open_connection(HOST, port, limit=_BUFFER_SIZE)

    async def _join(
        self,
        reader: StreamReader,
        writer: StreamWriter,
        peer: str,
        hello: dict[str, Any],
    ) -> None:
        """Admit a host to the job; its number is reserved for the lifetime of the connection."""
        number = hello.get("number")
        if not isinstance(number, int) or number < 0:  # the rendezvous assigns the numbers
            number = None
        elif number in self._hosts and hello.get("again"):
            send_reply(writer, "its old connection is not lost yet", again=True)
            return
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
            await self._accept(writer, "join")
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


class TunnelClient(_Tunnel):
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
        super().__init__(_CLIENT_CLOSE_TIMEOUT)
        self._host, self._port, self._key, self._hello = host, port, key, hello
        self._encryption = make_context(key, is_server=False) if key else None
        self._notify = notify
        self._membership: StreamWriter | None = None
        self.store_port = 0
        """The port on this host's loopback interface that leads to the launchers' store."""
        self._rank_store_port = 0
        self._attempt = 0

    def rank_store_port(self, attempt: int) -> int:
        """Return the port on this host's loopback interface that leads to an attempt's store."""
        self._attempt = attempt
        return self._rank_store_port

    def connect(self, seconds: float, *, again: bool = False) -> None:
        """Join the job and start to forward connections; block until the server is reachable.

        Args:
            seconds: The limit of the wait, in seconds.
            again: True if this host has been in the job before. It tries again then while its
                number is taken, which it is until the server notices the loss of its connection.

        Raises:
            LaunchError: The server was not reachable in time, or rejects this host.
        """
        self._call(self._connect(seconds, again=again))

    def close(self) -> None:
        """Leave the job, stop listening and close all connections."""
        if self._membership is not None:
            self._loop.call_soon_threadsafe(self._membership.close)
        super().close()

    async def _connect(self, seconds: float, *, again: bool) -> None:
        end, notice_time = time.monotonic() + seconds, time.monotonic() + _NOTICE_SECONDS
        while True:
            try:
                _, self._membership = await self._open_service("join", again=again)
                break
            except NotYetError as refusal:
                reason = str(refusal)
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
        self.store_port, self._rank_store_port = store.getsockname()[1], ranks.getsockname()[1]
        relay = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        relay.bind(self.relay_socket.replace("@", "\0"))
        for listener, service in ((store, "store"), (ranks, "ranks"), (relay, "relay")):
            await self._listen(listener, partial(self._forward, service))

    @property
    def _server(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    async def _forward(self, service: str, reader: StreamReader, writer: StreamWriter) -> None:
        """Forward a connection to a service behind the server, with retries.

        The server knows this host. If it drops a handshake, it has too many in progress.
        """
        for tries in range(1, _MAX_TRIES + 1):
            try:
                stream = await self._open_service(service)
                break
            except RejectedError:  # the server reports it
                return
            except asyncio.TimeoutError:  # the timeout is long enough
                raise
            except (OSError, EOFError):
                if tries == _MAX_TRIES:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
        await _splice((reader, writer), stream)

    async def _open_service(self, service: str, *, again: bool = False) -> _Stream:
        """Open a connection to a service behind the server."""
        connecting = asyncio.open_connection(
            self._host, self._port, limit=_BUFFER_SIZE, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS
        )
        reader, writer = await asyncio.wait_for(connecting, _HANDSHAKE_SECONDS)
        try:
            _enable_keepalive(writer)
            if service != "relay":  # a reader behind the relay may pause
                _set_user_timeout(writer)
            hello = {**self._hello, "service": service, "again": again}
            if service == "ranks":
                hello["attempt"] = self._attempt
            handshake = authenticate_to_server(reader, writer, self._key, hello)
            await asyncio.wait_for(handshake, _HANDSHAKE_SECONDS)
            if self._encryption is not None and service != "relay":
                handshake = encrypt(writer, self._encryption, is_server=False)
                await asyncio.wait_for(handshake, _HANDSHAKE_SECONDS)
        except ssl.SSLError as error:
            writer.close()
            raise RejectedError(
                f"the connection can't be encrypted ({error.reason}): another program may change "
                "what the hosts send, or a host lacks TLS 1.3"
            ) from None
        except BaseException:
            writer.close()
            raise
        return reader, writer


def _reason(error: Exception) -> str:
    """Return the system's text for a connection error; asyncio's texts are for programmers."""
    number = getattr(error, "errno", None) or 0
    if number > 0:
        return os.strerror(number)
    return getattr(error, "strerror", None) or "no answer"


async def _splice(one: _Stream, other: _Stream) -> None:
    """Forward data between two connections in both directions until both have ended."""
    try:
        await asyncio.gather(_copy(one[0], other[1]), _copy(other[0], one[1]))
    finally:
        for _, writer in (one, other):
            writer.close()
    for _, writer in (one, other):  # what is on its way may still have to be encrypted
        await writer.wait_closed()


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    while data := await reader.read(_BUFFER_SIZE):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    else:  # one direction of an encrypted connection cannot end alone
        writer.close()


def _enable_keepalive(writer: StreamWriter) -> None:
    """Enable keep-alive, so that the loss of the peer is detected within half a minute."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _set_user_timeout(writer: StreamWriter) -> None:
    """Detect the loss of the peer within half a minute even while an acknowledgement is pending.

    Keep-alive is inactive then, and the kernel would retry for a quarter of an hour. Use it only if
    both ends always read: it also ends a connection whose reader pauses for longer.
    """
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MILLISECONDS)


class RejectedError(Exception):
    """The peer is not the tunnel server of this job, or rejects this host; the message says why."""


class NotYetError(Exception):
    """The tunnel server does not admit this host yet."""


class HandshakeError(Exception):
    """The peer does not have the key, or does not follow the protocol."""


async def authenticate_client(
    reader: StreamReader, writer: StreamWriter, key: bytes
) -> dict[str, Any]:
    """Authenticate a client and return its hello.

    Has no timeout; the caller sets one.

    Raises:
        HandshakeError: The client does not have the key, or its hello is invalid.
        EOFError: The client has closed the connection.
        OSError: The connection is broken.
    """
    try:
        await _authenticate(reader, writer, make_handshake(key, is_initiator=False))
    except AuthenticationError:
        raise HandshakeError("it has a different key or none") from None
    return await _receive(reader)


def send_reply(writer: StreamWriter, error: str, *, again: bool = False) -> None:
    """Reply to a client's hello.

    Args:
        writer: The connection.
        error: Why it is not accepted; empty if it is.
        again: Whether the client is to try again.
    """
    _send(writer, {"error": error, "again": again})


async def authenticate_to_server(
    reader: StreamReader, writer: StreamWriter, key: bytes, hello: dict[str, Any]
) -> None:
    """Authenticate this host and the tunnel server to each other, and send a hello.

    Raises:
        RejectedError: The server rejects this host, or is not the one of this job.
        NotYetError: The server does not admit this host yet.
        EOFError: The server has closed the connection.
        OSError: The connection is broken.
    """
    handshake = make_handshake(key, is_initiator=True)
    try:
        await _authenticate(reader, writer, handshake)
    except ProtocolMismatch:
        raise RejectedError(
            "the program there is not `phalanx run`, or is a different version"
        ) from None
    except WrongKey:
        writer.write(handshake.refuse())  # the server reports it too
        raise RejectedError(
            "the two hosts have different keys, or only one of them has a key"
        ) from None
    _send(writer, hello)
    try:
        reply = await _receive(reader)
    except HandshakeError as error:
        raise RejectedError(f"{error}") from None
    if reply.get("error"):
        kind = NotYetError if reply.get("again") else RejectedError
        raise kind(str(reply["error"]))


def make_handshake(key: bytes, *, is_initiator: bool) -> Handshake:
    """Return one side of the handshake; the client is the initiator."""
    return Handshake(derive(key, "tunnel"), _PROTOCOL, is_initiator=is_initiator)


async def _authenticate(reader: StreamReader, writer: StreamWriter, handshake: Handshake) -> None:
    writer.write(handshake.begin())
    while handshake.missing:
        # Less than what is missing can be enough to notice another protocol.
        data = await reader.read(handshake.missing)
        if not data:
            raise EOFError("the connection was closed during the handshake")
        writer.write(handshake.receive(data))


def _send(writer: StreamWriter, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    writer.write(len(text).to_bytes(4, "big") + text)


async def _receive(reader: StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MAX_HELLO_BYTES:
        raise HandshakeError(f"its hello has {size} bytes")
    try:
        message = json.loads(await reader.readexactly(size))
    except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
        raise HandshakeError("its hello can't be parsed") from None
    if not isinstance(message, dict):
        raise HandshakeError("its hello is not a JSON object")
    return message
