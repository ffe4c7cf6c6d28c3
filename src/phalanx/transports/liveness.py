"""Detection of a peer that ends before there is a connection to it.

Each rank listens on a port and accepts no connection. A rank that waits for a peer connects to this
port. The peer's kernel keeps the connection until the peer stops listening or its process ends.
"""

from __future__ import annotations

import contextlib
import socket

__all__ = ["LivenessListener", "LivenessProbe"]

_BACKLOG = 4096


class LivenessListener:
    """The port by which other ranks detect that this rank is alive.

    Args:
        address: The address to listen on.

    Raises:
        OSError: The address is not one of this machine.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.endpoint = f"{self._socket.getsockname()[1]} {address}"
        """The port and address to give to a `LivenessProbe`."""

    def close(self) -> None:
        """Stop listening; all probes detect it."""
        self._socket.close()


class LivenessProbe:
    """A connection to a peer's port, by which this rank detects the peer's end.

    Args:
        endpoint: The peer's `LivenessListener.endpoint`.
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
            return error.strerror or str(error)
        return ""

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        family = socket.AF_INET6 if ":" in self._peer[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._socket.connect(self._peer)
