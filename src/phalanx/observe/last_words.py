"""What a process says when an exception ends it: to its black box and, at once, to its peers.

Python needs tenths of a second to leave after an exception that nobody caught. Peers that wait for
this rank need not: who wants to tell them registers with `on_failure`.
"""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

from phalanx import _native
from phalanx.observe.escape import encodable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["SESSION_ENDED", "announce", "install", "on_failure", "words_of"]

SESSION_ENDED = "its session ended with "
"""How the reason of a group begins whose rank has left `with phalanx.init()` by an exception."""

_calls: list[Callable[[], None]] = []
_installed = False


def on_failure(call: Callable[[], None]) -> None:
    """Have `call`, which must not raise, called when an exception ends this process."""
    _calls.append(call)


def announce(error: BaseException) -> None:
    """Say that `error` ends this process, or the function that it was started for."""
    try:
        _native.note_ending("failed", words_of(error))
    finally:  # whatever the words were, peers wait
        for call in _calls:
            call()


def words_of(error: BaseException) -> str:
    """What an exception is, and says, in a line."""
    lines = traceback.format_exception_only(type(error), error)
    # What begins with a space is the place of a SyntaxError; notes come behind.
    words = next((line for line in lines if not line.startswith(" ")), "").strip()
    return encodable(words.partition("\n")[0])


def install() -> None:
    """Announce every exception that nobody catches; a second call does nothing.

    Not where a person types statements, since the process outlives the exception there.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (hasattr(sys, "ps1") or sys.flags.interactive):
            announce(error)
        before(kind, error, trace)

    sys.excepthook = hook
