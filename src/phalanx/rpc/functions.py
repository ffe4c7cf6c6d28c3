"""`async_execution`, for functions that return a future, and the futures of calls.

`torch.futures.Future.set_exception` stores an exception as a value that raises when it is read.
PyTorch's C++ code takes such a future for a successful one, so `collect_all` and `wait_all` would
wait for all other calls before they report a failure. For lists that contain the future of a call,
this module makes them end at the first failure, as their documentation says.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.errors import ArgumentTypeError
from phalanx.torch_versions import FutureBase

__all__ = [
    "ASYNC_EXECUTION_MARK",
    "CallFuture",
    "FutureResult",
    "async_execution",
    "end_at_first_failure",
]

_Future = torch.futures.Future[Any]

ASYNC_EXECUTION_MARK = "_wrapped_async_rpc_function"
"""The mark of a function that returns a future of its result.

It is PyTorch's, so that functions which PyTorch's decorator has marked work too.
"""


def async_execution(
    function: Callable[..., torch.futures.Future[Any]],
) -> Callable[..., torch.futures.Future[Any]]:
    """Mark a function that returns a future; the caller gets the result of that future.

    No thread waits for it meanwhile. For static and class methods, apply this decorator below
    `@staticmethod` or `@classmethod`.

    Example:
        >>> @rpc.functions.async_execution
        ... def add_later(value):
        ...     future = rpc.rpc_async("ps", torch.add, args=(value, 1))
        ...     return future.then(lambda added: added.wait() * 10)
        >>> rpc.rpc_sync("ps", add_later, args=(torch.zeros(2),))
        tensor([10., 10.])
    """

    # A TorchScript function has no name of its own; the function that was compiled has.
    @functools.wraps(getattr(function, "_torchdynamo_inline", function))
    def marked(*args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        return function(*args, **kwargs)

    setattr(marked, ASYNC_EXECUTION_MARK, function)
    return marked


class FutureResult:
    """A result that a future will hold."""

    def __init__(self, future: Any, function: object) -> None:
        if not isinstance(future, FutureBase):  # `then` returns the base class
            expected = "Functions decorated with @rpc.async_function must return a "
            if isinstance(getattr(function, ASYNC_EXECUTION_MARK, None), torch.jit.ScriptFunction):
                expected = "Async functions must return an IValue of Future type, but got "
            else:
                expected += "torch.futures.Future object, but got "
            raise ArgumentTypeError(f"{expected}{type(future).__name__} from {function}")
        self.future: Any = future


class CallFuture(torch.futures.Future[Any]):
    """The result of a call, or the exception that it raised."""

    is_sent = True
    """False if the call failed before the worker could receive it."""


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
