"""`async_execution`, for functions whose result comes later."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from phalanx.rpc.executing import DEFERRED

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["async_execution"]


def async_execution(
    function: Callable[..., torch.futures.Future[Any]],
) -> Callable[..., torch.futures.Future[Any]]:
    """Mark a function that returns a future of its result: the caller gets what the future gets.

    No thread waits for it meanwhile. Static and class methods are marked below `@staticmethod` or
    `@classmethod`.
    """

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        return function(*args, **kwargs)

    setattr(marked, DEFERRED, function)
    return marked
