"""The failures of operations of which the program knows, and those that nobody has seen.

A failed operation whose error nobody has seen must not be lost: it is raised when the rank leaves
its groups. But once the program has got an error that broke a group, or Ctrl-C, all others are the
consequences: then a rank that leaves neither waits for what is under way nor raises anything. So it
is after `abort`. The next group that this process forms begins anew.
"""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class _State:
    first: BaseException | None = None
    is_known = False


_state = _State()


def is_known() -> bool:
    """Return whether the program has got an error of an operation."""
    return _state.is_known


def mark_known() -> None:
    """Note that the program knows that an operation fails, or ends it itself."""
    _state.is_known = True


def seen(error: _Error) -> _Error:
    """Note that the program gets an error, and return it."""
    mark_known()
    return error


def unseen(error: BaseException) -> None:
    """Keep the error of an operation for which nobody has waited, if it is the first."""
    if _state.first is None:
        _state.first = error


def take() -> BaseException | None:
    """Return the first error, once; None if there is none, or if the program knows of a failure."""
    first, _state.first = _state.first, None
    return None if _state.is_known else first


def begin_anew() -> None:
    """Forget a failure that the program knows of: this process has formed another group."""
    if _state.is_known:
        _state.first, _state.is_known = None, False
