"""Listeners for the loss of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["add_listener", "get_loss_reason", "notify_listeners"]

_listeners: list[Callable[[int], None]] = []
_reasons: dict[int, str] = {}


def add_listener(callback: Callable[[int], None]) -> None:
    """Register a function to call, in an RPC thread, with the id of each worker that is lost."""
    _listeners.append(callback)


def get_loss_reason(worker: int) -> str:
    """Return the reason for the loss of a worker; empty if it is not lost."""
    return _reasons.get(worker, "")


def notify_listeners(worker: int, reason: str) -> None:
    """Record the loss of a worker and call all registered functions."""
    _reasons[worker] = reason
    for callback in _listeners:
        callback(worker)
