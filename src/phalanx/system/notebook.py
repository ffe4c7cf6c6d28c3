"""Outputs of a notebook's cell that are replaced in place, such as a progress bar.

In a kernel of Jupyter, `find_cell` returns the running cell. `phalanx.launch` passes it on to the
ranks: each gets a pipe to the kernel, where an `OutputReader` shows the outputs that arrive.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Protocol


class Cell(Protocol):
    """A cell of a notebook."""

    def show(self, output_id: str, html: str, text: str, *, replaces: bool) -> None:
        """Show an output below the cell, or replace it.

        Args:
            output_id: A name that no other output of the notebook has.
            html: The output as HTML.
            text: The output for front ends without HTML.
            replaces: True to replace the output of this name, False for its first time.

        Raises:
            OSError: The kernel is gone.
        """
        ...


_inherited: Cell | None = None
"""The cell of the caller of `phalanx.launch`, in one of its ranks."""


def find_cell() -> Cell | None:
    """Return the cell in which this process or its `phalanx.launch` runs; None if there is none."""
    if _inherited is not None:
        return _inherited
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    kernel = getattr(shell, "kernel", None)  # a terminal's IPython has none
    if kernel is None or kernel.session.pid != os.getpid():  # a fork can't use the kernel's sockets
        return None
    return _KernelCell(shell)


def inherit_cell(fd: int) -> None:
    """Let `find_cell` return a cell that is reached through a pipe.

    Args:
        fd: The write end of a pipe that an `OutputReader` reads.
    """
    global _inherited  # noqa: PLW0603 - a process has one cell
    _inherited = _PipeCell(fd)


class _KernelCell:
    """The running cell of the kernel that is this process."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def show(self, output_id: str, html: str, text: str, *, replaces: bool) -> None:
        self._shell.display_pub.publish(
            {"text/html": html, "text/plain": text},
            transient={"display_id": output_id},
            update=replaces,
        )


class _PipeCell:
    """A cell of the process that reads a pipe; an output is a line of JSON."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "wb")

    def show(self, output_id: str, html: str, text: str, *, replaces: bool) -> None:
        output = {"output_id": output_id, "html": html, "text": text, "replaces": replaces}
        self._pipe.write(json.dumps(output).encode() + b"\n")
        self._pipe.flush()


class OutputReader:
    """A reader of the outputs that one process sends by `inherit_cell`'s pipe."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._pending = b""

    def write(self, owner: object, prefix: bytes, text: bytes) -> None:  # noqa: ARG002
        """Show the outputs that are complete; the parameters are those of a `Sink`.

        Raises:
            OSError: The kernel is gone.
        """
        *lines, self._pending = (self._pending + text).split(b"\n")
        for line in lines:
            self._cell.show(**json.loads(line))
