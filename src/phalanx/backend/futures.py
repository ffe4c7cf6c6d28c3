"""The futures of works: as PyTorch's, but what went wrong stays what it was.

PyTorch's own futures can't be given an error from Python: `set_exception` stores the exception as
the value, which C++ takes for the result (DDP's reducer looks for a tensor in it, and crashes), and
`then` makes a RuntimeError of whatever its callback raises.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class WorkFuture(Future[Any]):
    """A future that fails with the exception that it is given, in Python, here and down the chain.

    C++ code gets a RuntimeError with the same words.

    Args:
        until_over: Blocks until what the future is of has ended: a wait that Python can see, where
            PyTorch's own in C++ could only be left to the deadline.
    """

    def __init__(self, until_over: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._until_over = until_over

    def wait(self) -> Any:
        """Block until it has ended; its value, or raise what went wrong."""
        until_over = self._until_over
        if until_over is not None:
            until_over()
        return super().wait()

    def set_result(self, result: Any) -> None:
        """End it with a value."""
        super().set_result(result)
        self._until_over = None  # which holds the work, and so its tensors and this future

    def fail(self, error: BaseException) -> None:
        """End it: `wait` and `value` raise an exception like `error`."""
        self._set_unwrap_func(_raise)
        self.set_result(_Failed(_twin(error)))

    def then(self, callback: Callable[[Future[Any]], T]) -> Future[T]:
        """A future of what `callback` returns or raises when it is given this one, ended."""
        child = WorkFuture(self._until_over)

        def run(_ended: object) -> None:
            try:
                value = callback(self)
            except Exception as error:  # noqa: BLE001 - raised again where the child is waited for
                child.fail(error)
            else:
                child.set_result(value)

        self.add_done_callback(run)
        return child


class _Failed:
    """Stands in a future where there is no value."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        # C++ looks for the tensors of a value by pickling it.
        raise self.error

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def _raise(failed: _Failed) -> NoReturn:
    raise _twin(failed.error)


def _twin(error: BaseException) -> BaseException:
    """The same exception without a traceback.

    In its frames stand the work and the future themselves. As the future's value is held in C++,
    the garbage collector would never see that the ring of them can go.
    """
    try:
        twin = copy.copy(error)
    except Exception:  # noqa: BLE001 - one that can't be made from its own arguments
        return error
    return twin if type(twin) is type(error) else error
