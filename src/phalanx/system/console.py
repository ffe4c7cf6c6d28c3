"""Consoles of rich on the standard streams: when they have colours, and when they are redrawn."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 200


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console on stdout or stderr.

    Its `is_terminal` is True if the cursor of the stream can be moved, and only then does anything
    of rich write a control code other than a colour: a bar, a table that is redrawn, a spinner.
    Lines are wide unless the stream is a terminal.

    rich omits colours if the variable NO_COLOR is set, if TERM is "dumb", and in a file or a pipe
    unless FORCE_COLOR is set.

    Args:
        stderr: True for a console on stderr.
        quiet: True to print nothing.
    """
    from rich.console import Console

    is_tty = _is_tty(sys.stderr if stderr else sys.stdout)
    # rich takes FORCE_COLOR for a terminal, so the colours are detected by a console of their own.
    colors = Console(stderr=stderr, force_jupyter=False)
    can_redraw = is_tty and not colors.is_dumb_terminal and not is_notebook_command()
    return Console(
        stderr=stderr,
        quiet=quiet,
        highlight=False,
        width=None if is_tty or "COLUMNS" in os.environ else _PLAIN_WIDTH,
        force_terminal=None if can_redraw else False,
        force_interactive=None if can_redraw else False,
        force_jupyter=False,
        color_system=colors.color_system,  # type: ignore[arg-type]
    )


def has_styles(console: Console) -> bool:
    """Return True for a terminal, and for a console with colours on a file or a pipe."""
    return console.color_system is not None or _is_tty(console.file)


def is_notebook_command() -> bool:
    """Return True below a kernel of Jupyter, as for `!command` in a cell of a notebook.

    IPython gives such a command a terminal, but the cell only appends what is written there.
    """
    # jupyter_client sets the first for its kernels; an editor may start a kernel without it. Every
    # kernel of ipykernel sets the others.
    return "JPY_PARENT_PID" in os.environ or (
        os.environ.get("TERM") == "xterm-color" and os.environ.get("PAGER") == "cat"
    )


def _is_tty(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)  # a replaced sys.stdout may have no such method
    try:
        return isatty is not None and bool(isatty())
    except ValueError:  # the stream is closed
        return False
