"""Incoming connections of a worker: their authentication, and the requests on them."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from phalanx.rpc.codec.message import ANSWERS, Malformed, Message, parse
from phalanx.rpc.transport.auth import Acceptor
from phalanx.rpc.transport.local import LocalConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.rpc.codec.message_codec import Frames
    from phalanx.rpc.event_loop.reactor import Reactor
    from phalanx.rpc.transport.remote import RemoteRouter

__all__ = ["RpcServer"]

_LOG = logging.getLogger("phalanx.rpc")


class RpcServer:
    """The server side of a worker.

    Args:
        name: The name of this worker, for messages.
        key: The key of the job.
        address: The address at which workers on this host connect.
        reactor: The event loop.
        on_request: Called with each request and a function that sends an answer to it.
    """

    def __init__(
        self,
        name: str,
        key: bytes,
        address: str,
        reactor: Reactor,
        on_request: Callable[[Message, Callable[[Frames], None]], None],
    ) -> None:
        self._name, self._reactor, self._on_request = name, reactor, on_request
        self._acceptor = Acceptor(key, address, self.log_rejection)
        self._connections: dict[int, LocalConnection] = {}
        self._has_rejected = self._has_dropped = False
        self._workers = 0

    def open(self, workers: int, router: RemoteRouter | None) -> None:
        """Start to accept connections and requests.

        Args:
            workers: The number of workers.
            router: The socket for workers on other hosts; None if there are none.
        """
        self._workers = workers
        self._reactor.watch(self._acceptor.fd, self._accept)
        if router is not None:
            self._reactor.watch(router.fd, partial(self._receive, router))
            self._reactor.watch(router.monitor_fd, partial(self._check_handshakes, router))

    def close(self) -> None:
        """Close all connections from workers on this host."""
        self._acceptor.close()
        for connection in self._connections.values():
            connection.close()

    def log_rejection(self) -> None:
        """Log that a connection was rejected; only the first one is logged."""
        if not self._has_rejected:
            self._has_rejected = True
            _LOG.warning(
                "worker %r rejected a connection without the job's key; further rejections are not "
                "logged",
                self._name,
            )

    def log_malformed(self, error: Malformed) -> None:
        """Log a malformed message; only the first one is logged."""
        if not self._has_dropped:
            self._has_dropped = True
            _LOG.warning(
                "worker %r dropped a malformed message: %s; further ones are not logged",
                self._name,
                error,
            )

    def _accept(self) -> None:
        for fd in self._acceptor.accept():
            self._reactor.watch(fd, partial(self._authenticate, fd))
        for fd in self._acceptor.find_excess():
            self._reactor.unwatch(fd)
            self._acceptor.reject(fd)

    def _authenticate(self, fd: int) -> None:
        connection = self._acceptor.authenticate(fd)
        if connection is True:
            return
        self._reactor.unwatch(fd)
        if isinstance(connection, LocalConnection):
            self._connections[fd] = connection
            self._reactor.watch(fd, partial(self._read, connection))
        else:
            self._acceptor.reject(fd)

    def _read(self, connection: LocalConnection) -> None:
        messages = connection.read()
        if messages is None:
            self._reactor.unwatch(connection.fd)
            del self._connections[connection.fd]
            connection.close()
            return
        answer = partial(_reply, connection)
        self._reactor.submit(*(partial(self._handle, answer, (each, [])) for each in messages))

    def _receive(self, router: RemoteRouter) -> None:
        messages = router.receive()
        self._reactor.submit(
            *(
                partial(self._handle, partial(self._send, router, identity), frames)
                for identity, frames in messages
            )
        )
        if len(messages) == router.max_messages:
            self._reactor.submit(partial(self._receive, router))

    def _send(self, router: RemoteRouter, identity: bytes, frames: Frames) -> None:
        if router.send(identity, *frames):
            self._reactor.submit(partial(self._receive, router))

    def _check_handshakes(self, router: RemoteRouter) -> None:
        if router.has_event():
            self.log_rejection()

    def _handle(self, answer: Callable[[Frames], None], frames: Frames) -> None:
        try:
            message = parse(*frames, self._workers)
            if message.kind in ANSWERS:
                raise Malformed("an answer in place of a request")
        except Malformed as error:
            self.log_malformed(error)
            return
        self._on_request(message, answer)


def _reply(connection: LocalConnection, frames: Frames) -> None:
    with contextlib.suppress(OSError):  # the caller is gone
        connection.send_answer(frames[0])
