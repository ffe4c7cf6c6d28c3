"""Operations as events of PyTorch's profiler, with names and shapes as in its own backends.

An event is named "phalanx:all_reduce" (or "gloo:all_reduce", see `replace`) and has the shapes of
the tensors. It begins with the call and ends with the operation, in another thread. The profiler
thereby recognizes the event as asynchronous, and excludes its duration from the caller's self time.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch._C import _autograd
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from phalanx import _native

__all__ = ["begin_event", "is_profiling", "record_call", "record_event"]

is_profiling: Callable[[], bool] = _autograd._profiler_enabled
"""Return whether a profiler records in the calling thread."""


@contextmanager
def record_event(name: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Record an event in the calling thread alone, such as "c10d::allreduce_"."""
    handle = _autograd._record_function_with_args_enter(name, *tensors)
    try:
        yield
    finally:
        _autograd._record_function_with_args_exit(handle)


def record_call(
    name: str, tensors: Sequence[torch.Tensor], call: Callable[[float], _native.Status | None]
) -> Callable[[float], _native.Status | None]:
    """Begin an event now; return a wrapper of the native `call` that ends the event."""
    end = begin_event(name, tensors)

    def run(timeout: float) -> _native.Status | None:
        try:
            return call(timeout)
        finally:
            end()

    return run


def begin_event(name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Begin an event in the calling thread; return a function that ends it, called once.

    The function may be called in any thread.

    Args:
        name: The name of the event, such as "phalanx:all_reduce".
        tensors: The tensors whose shapes the event has, if the profiler records shapes.
    """
    handle = _autograd._record_function_with_args_enter(name, *tensors)
    # The future carries the profiler's state, which is per thread, to the thread that ends it.
    done: Future[None] = Future()
    torch.ops.profiler._call_end_callbacks_on_jit_fut(handle, done)

    def end() -> None:
        thread = threading.Thread(target=done.set_result, args=(None,))
        thread.start()
        thread.join()

    return end
