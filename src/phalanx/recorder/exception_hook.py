"""A fatal exception of a rank: recorded, announced to peers at once, and printed.

Python needs some tenths of a second to exit after an uncaught exception. Peers that wait for this
rank need not wait that long: callbacks registered with `on_failure` notify them.

Under the launchers of Phalanx, the exception is printed in short, since all ranks print theirs. The
rank at fault prints a traceback without the frames inside libraries. A rank prints one line if its
exception only says what happened to another rank, or if a rank of its host has printed the same.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

from phalanx import _native, env
from phalanx.system.escape import encodable
from phalanx.system.tracebacks import find_last_own_frame, format_folded
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from traceback import FrameSummary
    from types import TracebackType

SESSION_ENDED = "its session ended with "
"""Prefix of a group's abort reason if an exception left the rank's `with phalanx.init()`."""

CAUSED_BY = " (caused by "
"""Separator between an exception and its cause in the text that `format_exception` returns."""

_MAX_CAUSES = 16
_WORKER_EXIT_SECONDS = 0.2

_LABEL = re.compile(r"\[rank (\d+)/\d+ on [^\]]*\] ")
"""The beginning of the message of an error in a group; the prefix of the launcher has it too."""
_CONVERTED = re.compile(r"[^:\n]*: (PeerLost|CollectiveTimeout|Aborted): (.*)")
"""The text of such an error in a RuntimeError that PyTorch's C++ code (DDP) made of it."""

_callbacks: list[Callable[[], None]] = []
_installed = False


def on_failure(call: Callable[[], None]) -> None:
    """Register a function to call when an exception ends this process; it must not raise."""
    _callbacks.append(call)


def announce(error: BaseException) -> None:
    """Announce that `error` ends this process or the function that it was started for."""
    try:
        text = format_exception(error)
    except RuntimeError as interruption:  # from a signal handler, as DataLoader's of SIGCHLD
        text = encodable(f"{_format_line(error)}{CAUSED_BY}{_format_line(interruption)})")
    try:
        _native.record_ending("failed", text)
    finally:  # peers must be notified in any case
        for call in _callbacks:
            call()


def format_exception(error: BaseException) -> str:
    """Return an exception's type and message in one line, with its root cause if any.

    A DataLoader worker that was killed counts as the cause of a failed connection to it.
    """
    text, cause = _format_line(error), error
    for _ in range(_MAX_CAUSES):
        if cause.__cause__ is None:
            break
        cause = cause.__cause__
    if cause is not error:
        text += f"{CAUSED_BY}{_format_line(cause)})"
    elif lost := _describe_lost_worker(error):
        text += f"{CAUSED_BY}{lost})"
    return encodable(text)


def _describe_lost_worker(error: BaseException) -> str:
    """Name the killed DataLoader worker that made a connection fail, or return "".

    PyTorch names the worker only if its SIGCHLD handler runs before the connection is used. Waits a
    fraction of a second for the worker to exit, since a process closes its connections first.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_loading = any(frame.filename.endswith("torch/utils/data/dataloader.py") for frame in frames)
    if not is_loading or not isinstance(error, (ConnectionError, EOFError)):
        return ""
    from multiprocessing import connection, process

    children: Any = process._children.copy()  # type: ignore[attr-defined]
    ended = connection.wait([child.sentinel for child in children], _WORKER_EXIT_SECONDS)
    for child in children:
        if child.sentinel not in ended:
            continue
        child.join(_WORKER_EXIT_SECONDS)
        if (child.exitcode or 0) < 0:
            name = signal.strsignal(-child.exitcode)
            return f"DataLoader worker (pid {child.pid}) is killed by signal: {name}."
    return ""


def _format_line(error: BaseException) -> str:
    lines = traceback.format_exception_only(type(error), error)
    # Lines that begin with a space are the location of a SyntaxError; notes follow the message.
    text = next((line for line in lines if not line.startswith(" ")), "").strip()
    return text.partition("\n")[0]


def is_interactive() -> bool:
    """Return whether this process outlives its uncaught exceptions."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def install(keep: Callable[[str], bool], find_first: Callable[[str], str]) -> None:
    """Announce and print every uncaught exception from now on; a second call does nothing.

    Exceptions in an interactive session are not announced, since the process outlives them. They
    are printed as before, and so are all if `PHALANX_TRACEBACKS` does not request short texts, or
    if the program has a hook of its own.

    Args:
        keep: A function that keeps the whole traceback of an exception that will be printed in
            short. If it returns False, the whole traceback is printed.
        find_first: A function that returns which rank of this host has had a text before, empty
            for none. With `PHALANX_TRACEBACKS=once`, this rank then refers to that one.

    Raises:
        UsageError: `PHALANX_TRACEBACKS` is malformed.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    before = sys.excepthook
    try:
        wanted = env.tracebacks() if _prints_whole_traceback(before) else "all"
    except ValueError as error:
        raise UsageError(str(error)) from None
    _installed = True

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_interactive():
            before(kind, error, trace)
            return
        announce(error)
        whole = "".join(traceback.format_exception(kind, error, trace))
        if wanted == "all" or sys.stderr is None or not keep(whole):
            before(kind, error, trace)
        else:
            sys.stderr.write(shorten(error, find_first if wanted == "once" else None))

    sys.excepthook = hook


def _prints_whole_traceback(hook: Any) -> bool:
    """Return whether a hook is Python's, or that of PyTorch, which adds a prefix to its lines."""
    is_torch = str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
    return hook is sys.__excepthook__ or is_torch


def shorten(error: BaseException, find_first: Callable[[str], str] | None = None) -> str:
    """Return the text of an uncaught exception, with line ends: a line, or a folded traceback.

    Args:
        error: The exception.
        find_first: A function that returns the rank that prints the same traceback, empty for none.
    """
    if line := describe_consequence(error):
        return f"{line}\n"
    text = format_folded(error)
    first = find_first(text) if find_first is not None else ""
    if not first:
        return text
    frame = find_last_own_frame(error)
    site = "" if frame is None else f"at {_format_site(frame)}, "
    return encodable(f"{_format_line(error)} ({site}as on rank {first})\n")


def describe_consequence(error: BaseException) -> str:
    """Return a line for an exception that only says what happened to other ranks, else "".

    An exception that was raised from one of another type, or while one was handled, is no such
    exception: the other one may be the cause of all.
    """
    found = _find_consequence(error)
    if found is None or not all(map(_find_consequence, _list_chain(error))):
        return ""
    name, text = found
    label = _LABEL.match(text)
    if label and label[1] == os.environ.get("RANK"):
        text = text[label.end() :]
    line = encodable(f"{name}: {text.splitlines()[0] if text else ''}")
    frame = find_last_own_frame(error)
    if frame is None:
        return line
    site = _format_site(frame)
    return line if site.partition(" ")[0] in line else f"{line} (at {site})"


def _format_site(frame: FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


def _find_consequence(error: BaseException) -> tuple[str, str] | None:
    """Return the name and message of an error about other ranks; None for another exception."""
    # Imported here because it imports torch: what reads records needs only the names above.
    from phalanx.errors import Aborted, CollectiveMismatch, CollectiveTimeout, PeerLost

    text = str(error)
    if type(error) is RuntimeError and (converted := _CONVERTED.match(text)):
        return converted[1], converted[2]
    consequences = (PeerLost, CollectiveTimeout, CollectiveMismatch, Aborted)
    if not isinstance(error, consequences) or not error.ranks:
        return None
    is_own = os.environ.get("RANK", "") in map(str, error.ranks)
    return None if is_own else (type(error).__name__, text)


def _list_chain(error: BaseException) -> list[BaseException]:
    """Return an exception with those that its traceback shows too."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is each for each in chain):
        chain.append(current)
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)
    return chain
