"""Operations as events of PyTorch's profiler, named and shaped as those of its own backends.

An event is named "phalanx:all_reduce" (or "gloo:all_reduce", see `replace`) and has the shapes of
the tensors. It begins with the call and ends with the operation, in another thread than it began
in: that is how the profiler knows an event to be asynchronous, and leaves what it took out of the
caller's own time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch._C import _autograd
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx import _native

__all__ = ["begin_event", "profiled", "profiling"]

profiling: Callable[[], bool] = _autograd._profiler_enabled
"""Whether a profiler records in the calling thread."""


def profiled(
    name: str, tensors: Sequence[torch.Tensor], call: Callable[[float], _native.Status | None]
) -> Callable[[float], _native.Status | None]:
    """Begin an event now, for a native call that is made later; it ends the event."""
    end = begin_event(name, tensors)

    def run(timeout: float) -> _native.Status | None:
        try:
            return call(timeout)
        finally:
            end()

    return run


def begin_event(name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Begin an event in the calling thread; the result, called once in any thread, ends it.

    Args:
        name: such as "phalanx:all_reduce".
        tensors: whose shapes the event gets, if the profiler records shapes.
    """
    event = _autograd._record_function_with_args_enter(name, *tensors)
    # A future carries the profiler's state, which is the caller's, to the thread that ends it.
    ended: Future[None] = Future()
    torch.ops.profiler._call_end_callbacks_on_jit_fut(event, ended)

    def end() -> None:
        thread = threading.Thread(target=ended.set_result, args=(None,))
        thread.start()
        thread.join()

    return end
