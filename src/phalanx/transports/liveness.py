"""Detection of a peer that ends before there is a connection to it.

Each rank listens on a port and accepts nothing. A rank that waits for a peer connects to this port,
and the peer's kernel holds the connection until the peer stops to listen or its process ends.
"""

from __future__ import annotations

import contextlib
import socket

__all__ = ["Liveness", "Probe"]

_BACKLOG = 4096


class Liveness:
    """The port by which other ranks see that this rank is still there.

    Args:
        address: The address to listen on.

    Raises:
        OSError: The address is not one of this machine.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.at = f"{self._socket.getsockname()[1]} {address}"
        """The port and address, for `Probe`."""

    def close(self) -> None:
        """Stop to listen; every probe ends."""
        self._socket.close()


class Probe:
    """A look at a peer's port.

    Args:
        at: The peer's `Liveness.at`.
    """

    def __init__(self, at: str) -> None:
        port, _, address = at.partition(" ")
        self._peer = address, int(port)
        self._socket: socket.socket | None = None

    def ended(self) -> str:
        """Return how the peer's end was seen; empty if it is there or unknown. Never blocks."""
        try:
            if self._socket is None:
                self._connect()
            elif not self._socket.recv(1):
                return "it no longer listens"
        except (BlockingIOError, InterruptedError):
            pass
        except TimeoutError:  # its kernel did not answer: the queue of its port is full
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
