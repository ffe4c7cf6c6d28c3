"""`async_execution`, for functions that return a future of their result."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ASYNC_EXECUTION_MARK", "FutureResult", "async_execution"]

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
        if not isinstance(future, torch._C.Future):  # `then` returns the base class
            expected = "Functions decorated with @rpc.async_function must return a "
            if isinstance(getattr(function, ASYNC_EXECUTION_MARK, None), torch.jit.ScriptFunction):
                expected = "Async functions must return an IValue of Future type, but got "
            else:
                expected += "torch.futures.Future object, but got "
            raise ArgumentTypeError(f"{expected}{type(future).__name__} from {function}")
        self.future: Any = future
