"""Futures of calls, and waiting for several of them.

`torch.futures.Future.set_exception` stores an exception as a value that raises when it is read.
PyTorch's C++ code takes such a future for a successful one, so `collect_all` and `wait_all` would
wait for all other calls before they report a failure. For lists that contain the future of a call,
this module makes them end at the first failure, as their documentation says.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import CallTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CallFuture", "PendingFuture", "end_at_first_failure"]

_Future = torch.futures.Future[Any]


class CallFuture(torch.futures.Future[Any]):
    """The result of a call, or the exception that it raised."""

    is_sent = True
    """False if the call failed before the worker could receive it."""


@dataclass
class PendingFuture:
    """A call that has no answer yet.

    Attributes:
        future: The future of the result.
        root: The id of the worker on whose behalf the call was made.
        description: A description of the call, for messages.
        keepalive: An object to keep alive until the answer arrives.
        grad: True if the calling thread recorded gradients.
        end: The deadline, in monotonic seconds.
        since: The start, in monotonic seconds.
    """

    future: torch.futures.Future[Any]
    root: int
    description: str
    keepalive: object
    grad: bool
    end: float
    since: float

    def timeout_error(self) -> CallTimeout:
        """Return the error for a call that has no answer in time."""
        return CallTimeout(f"{self.description} took longer than its timeout")


def end_at_first_failure() -> None:
    """Make `torch.futures.collect_all` and `wait_all` end at the first failed call.

    A second call does nothing.
    """
    for name, replacement in (("collect_all", _collect_all), ("wait_all", _wait_all)):
        original: Any = getattr(torch.futures, name)
        if not hasattr(original, "_of_phalanx"):
            setattr(torch.futures, name, _wrap(original, replacement))


def _wrap(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(futures: Sequence[_Future]) -> Any:
        futures = list(futures)
        has_call = any(isinstance(future, CallFuture) for future in futures)
        return (replacement if has_call else original)(futures)

    call._of_phalanx = True  # type: ignore[attr-defined]
    return call


def _wait_all(futures: list[_Future]) -> list[Any]:
    return [future.wait() for future in _collect_all(futures).wait()]


def _collect_all(futures: list[_Future]) -> _Future:
    collected: _Future = torch.futures.Future()
    lock = threading.Lock()
    remaining = len(futures)
    is_ended = False

    def end(future: _Future) -> None:
        nonlocal remaining, is_ended
        error = _error(future)
        with lock:
            remaining -= 1
            if is_ended or not (error or remaining == 0):
                return
            is_ended = True
        if error is None:
            collected.set_result(futures)
        else:
            collected.set_exception(error)

    for future in futures:
        future.add_done_callback(end)
    return collected


def _error(future: _Future) -> Exception | None:
    try:
        future.value()
    except Exception as error:  # noqa: BLE001 - the collected future raises it
        return error
    return None
