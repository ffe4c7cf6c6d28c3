"""Ports by which ranks of other hosts detect the end of this process.

A process listens on a port, and accepts no connection there. A rank that waits for it connects to
the port. The kernel of the process keeps the connection until the process stops listening or ends,
also if the process is busy or stopped.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import threading

_BACKLOG = 4096
_OWN_ERRORS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EPERM)
}
"""Errors of a probe that say nothing about the peer."""


def listen(address: str) -> socket.socket:
    """Listen on a free port; raise OSError if this is no address of this machine."""
    return socket.create_server((address, 0), family=_family(address), backlog=_BACKLOG)


def endpoint_of(server: socket.socket) -> str:
    """Return the port and the address of a socket of `listen`, for a probe."""
    address, port = server.getsockname()[:2]
    return f"{port} {address}"


@functools.cache
def process_endpoint(address: str) -> str:
    """Return the endpoint on which this process listens until it ends."""
    server = listen(address)
    _servers.append(server)
    return endpoint_of(server)


_servers: list[socket.socket] = []


def _close_in_child() -> None:
    # The child would answer for its parent.
    process_endpoint.cache_clear()
    while _servers:
        _servers.pop().close()


os.register_at_fork(after_in_child=_close_in_child)


class LivenessProbe:
    """A connection to a peer's port, by which this rank detects the peer's end.

    Args:
        endpoint: The port and the address on which the peer listens.
    """

    def __init__(self, endpoint: str) -> None:
        port, _, address = endpoint.partition(" ")
        self._peer = address, int(port)
        self._socket: socket.socket | None = None

    def detect_failure(self) -> str:
        """Return the sign of the peer's end; empty if it is alive or unknown. Never blocks."""
        try:
            if self._socket is None:
                self._connect()
            elif not self._socket.recv(1):
                return "it has stopped listening"
        except (BlockingIOError, InterruptedError):
            pass
        except TimeoutError:  # the peer's kernel did not answer: the queue of the port is full
            self.close()
        except OSError as error:
            if error.errno in _OWN_ERRORS:
                self.close()
                return ""
            return error.strerror or str(error)
        return ""

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        self._socket = socket.socket(_family(self._peer[0]), socket.SOCK_STREAM)
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._socket.connect(self._peer)
        # To a free port of this host, a socket that got the same port by chance connects to itself.
        if self._socket.getsockname()[:2] == self._peer:
            self.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


class LivenessProbes:
    """Probes of any number of processes, for use in several threads."""

    def __init__(self) -> None:
        self._probes: dict[str, LivenessProbe] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def has_ended(self, endpoint: str) -> bool:
        """Return whether the process at an endpoint is known to have ended. Never blocks."""
        with self._lock:
            if self._is_closed or not endpoint:
                return False
            if endpoint not in self._probes:
                self._probes[endpoint] = LivenessProbe(endpoint)
            return bool(self._probes[endpoint].detect_failure())

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._is_closed = True
            for probe in self._probes.values():
                probe.close()
            self._probes.clear()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
