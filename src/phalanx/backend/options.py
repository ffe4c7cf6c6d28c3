"""The options of operations, in the forms that PyTorch's own groups take.

A group's methods get an options object from `torch.distributed`, and from those who call them
directly the option that matters (root, operator) or nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


def options_of(
    kind: Callable[[], Any], field: str | None = None
) -> Callable[[Any, timedelta | None], Any]:
    """A function that makes an options object of what a method was given.

    Args:
        kind: The class of the options.
        field: What a value that is no options object is meant for.
    """

    def options(given: Any, timeout: timedelta | None) -> Any:
        if isinstance(given, kind):  # type: ignore[arg-type]
            return given
        made = kind()
        if given is not None:
            setattr(made, field or "timeout", given)
        if timeout is not None:
            made.timeout = timeout
        return made

    return options
