"""Waking a thread that polls."""

from __future__ import annotations

import contextlib
import os

__all__ = ["Wake"]


class Wake:
    """Something to poll, by which one thread wakes another."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def up(self) -> None:
        """Wake it, now or when it polls next."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Forget all wakes so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Let go of it; nobody may wake any more."""
        os.close(self.descriptor)
