"""What all sockets of the relay have in common."""

from __future__ import annotations

import os

import zmq

__all__ = ["FRAME", "Wake", "harden"]

FRAME = 256 * 2**10
"""The most data behind a word."""
_BEAT_MILLISECONDS = 2_000
_LOST_MILLISECONDS = 10_000


def harden(socket: zmq.Socket[bytes], where: str) -> None:
    """Set limits: of a message, and until a connection that says nothing is given up."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, where.startswith("tcp://["))
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * FRAME)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _LOST_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _LOST_MILLISECONDS)
    # How much may be on its way is agreed on by those who talk: what waits here is never dropped.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class Wake:
    """Something to poll, by which other threads wake the one that polls."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """What is polled."""
        return self._descriptor

    def up(self) -> None:
        """Wake it, now or when it polls next."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Forget all wakes so far."""
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Let go of it; nobody may wake any more."""
        os.close(self._descriptor)
