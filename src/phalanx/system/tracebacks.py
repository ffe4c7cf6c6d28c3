"""Tracebacks without the frames inside PyTorch, Phalanx and the interpreter.

The program's own frames remain whole. A run of other frames becomes one line, which counts them. If
the exception was raised inside PyTorch, that line also names the function that raised it.
"""

from __future__ import annotations

import os
import sys
from itertools import groupby
from traceback import FrameSummary, StackSummary, TracebackException
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_PHALANX = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_EXAMPLES = os.path.join(_PHALANX, "examples", "")
_STARTERS = ("<frozen runpy>", "<frozen importlib._bootstrap>", f"{os.sep}runpy.py")
"""The ends of the names of files that start a script, or a module as in `python -m`."""


def format_folded(error: BaseException) -> str:
    """Return an exception as Python prints it, with all causes, but with frames folded.

    Nothing is folded in a traceback that has no frame of the program.
    """
    report = TracebackException(type(error), error, error.__traceback__)
    _fold(report, set())
    return "".join(report.format())


def find_last_own_frame(error: BaseException) -> FrameSummary | None:
    """Return the innermost frame of the program in an exception's traceback; None without one."""
    frames = StackSummary.extract(_walk(error))
    return next((frame for frame in reversed(frames) if not _find_library(frame)), None)


def _walk(error: BaseException) -> Iterator[Any]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _fold(report: TracebackException, seen: set[int]) -> None:
    if id(report) in seen:
        return
    seen.add(id(report))
    report.stack = _FoldedStack(report.stack)
    exceptions = getattr(report, "exceptions", None) or ()  # of an ExceptionGroup, Python 3.11
    for other in (report.__cause__, report.__context__, *exceptions):
        if other is not None:
            _fold(other, seen)


class _FoldedStack(StackSummary):
    """A stack whose text has a line for each run of frames inside libraries."""

    def format(self, **options: Any) -> list[str]:
        runs = [
            (inside, list(run)) for inside, run in groupby(self, lambda f: _find_library(f) != "")
        ]
        if all(inside for inside, _ in runs):
            return super().format(**options)
        lines = []
        for number, (inside, run) in enumerate(runs):
            if not inside:
                lines += StackSummary.from_list(run).format(**options)
            elif number:  # frames before the program's first one have only started it
                lines.append(_format_run(run, is_innermost=number == len(runs) - 1))
        return lines


def _format_run(frames: list[FrameSummary], *, is_innermost: bool) -> str:
    libraries = sorted({_find_library(frame) for frame in frames}, reverse=True)
    text = f"  ... {len(frames)} frame{'s' * (len(frames) > 1)} inside {' and '.join(libraries)}"
    last = frames[-1]
    if is_innermost and _find_library(last) == "torch":
        text += f", the last in {last.name} ({os.path.basename(last.filename)}:{last.lineno})"
    return f"{text} ...\n"


def _find_library(frame: FrameSummary) -> str:
    """Return "torch", "phalanx" or "python" for a frame inside of them, "" for the program's."""
    name = frame.filename
    if name.startswith(_PHALANX):
        return "" if name.startswith(_EXAMPLES) else "phalanx"
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None and name.startswith(os.path.join(os.path.dirname(torch), "")):
        return "torch"
    return "python" if name.endswith(_STARTERS) else ""
