"""`async_execution`, for functions that return a future of their result."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from phalanx.rpc.request_handlers import ASYNC_EXECUTION_MARK

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["async_execution"]


def async_execution(
    function: Callable[..., torch.futures.Future[Any]],
) -> Callable[..., torch.futures.Future[Any]]:
    """Mark a function that returns a future; the caller gets the result of that future.

    No thread waits for it meanwhile. For static and class methods, apply this decorator below
    `@staticmethod` or `@classmethod`.
    """

    # A TorchScript function has no name of its own; the function that was compiled has.
    @functools.wraps(getattr(function, "_torchdynamo_inline", function))
    def marked(*args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        return function(*args, **kwargs)

    setattr(marked, ASYNC_EXECUTION_MARK, function)
    return marked
