"""The futures of works, which unlike PyTorch's preserve exceptions.

PyTorch's own futures cannot be failed from Python. `set_exception` stores the exception as the
value, which C++ takes for the result: DDP's reducer looks for a tensor in it, and crashes. `then`
converts any exception of its callback to a RuntimeError.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class WorkFuture(Future[Any]):
    """A future that fails, with all futures chained to it, with the exception that it is given.

    C++ code gets a RuntimeError with the same message.

    Args:
        wait_until_done: Blocks until the operation of the future has ended. Python code observes
            this wait; PyTorch's own wait in C++ could only be ended by the deadline.
    """

    def __init__(self, wait_until_done: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._wait_until_done = wait_until_done

    def wait(self) -> Any:
        """Block until the future has ended; return its value or raise its exception."""
        wait_until_done = self._wait_until_done
        if wait_until_done is not None:
            wait_until_done()
        return super().wait()

    def set_result(self, result: Any) -> None:
        """End the future with a value."""
        super().set_result(result)
        self._wait_until_done = None  # it references the work, and so its tensors and this future

    def fail(self, error: BaseException) -> None:
        """End the future with a failure: `wait` and `value` raise a copy of `error`."""
        self._set_unwrap_func(_raise)
        self.set_result(_FailedValue(_copy_exception(error)))

    def then(self, callback: Callable[[Future[Any]], T]) -> Future[T]:
        """Return a future of the result or exception of `callback`, called when this one has ended.

        The argument of `callback` is this future.
        """
        child = WorkFuture(self._wait_until_done)

        def run(_future: object) -> None:
            try:
                value = callback(self)
            except Exception as error:  # noqa: BLE001 - raised again by the child's wait
                child.fail(error)
            else:
                child.set_result(value)

        self.add_done_callback(run)
        return child


class _FailedValue:
    """The value of a failed future."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        # C++ pickles a value to find its tensors.
        raise self.error

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def _raise(failed: _FailedValue) -> NoReturn:
    raise _copy_exception(failed.error)


def _copy_exception(error: BaseException) -> BaseException:
    """Return a copy of an exception without its traceback; the exception itself if it has no copy.

    The traceback's frames reference the work and the future. Since C++ holds the future's value,
    the garbage collector could not detect and free this reference cycle.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - not constructible from its own arguments
        return error
    return copied if type(copied) is type(error) else error
