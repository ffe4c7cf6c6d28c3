"""Options and tools for all sockets of the relay and its clients."""

from __future__ import annotations

import os

import zmq

__all__ = ["FRAME", "Wake", "harden"]

FRAME = 256 * 2**10
"""Most bytes of data that accompany a word."""
_BEAT_MILLISECONDS = 2_000
_LOST_MILLISECONDS = 10_000


def harden(socket: zmq.Socket[bytes], where: str) -> None:
    """Set the limits of message sizes, and of the time until a silent connection is closed.

    Args:
        socket: The socket.
        where: The ZeroMQ address that it connects to or listens on.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, where.startswith("tcp://["))
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * FRAME)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _LOST_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _LOST_MILLISECONDS)
    # Sender and receiver limit the data in flight themselves, so nothing queued is ever dropped.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class Wake:
    """A pollable object by which other threads wake a polling thread."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._descriptor

    def up(self) -> None:
        """Wake the polling thread, now or at its next poll."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Clear all wakes so far."""
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; no thread may call `up` afterwards."""
        os.close(self._descriptor)
