"""An eventfd, by which one thread wakes another."""

from __future__ import annotations

import contextlib
import os

__all__ = ["EventFd"]


class EventFd:
    """An eventfd to poll, by which one thread wakes another."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def notify(self) -> None:
        """Wake the polling thread, now or when it polls next."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Discard all wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor; no thread may wake the other any more."""
        os.close(self.fd)
