"""Colours and control codes of consoles: on a terminal, in a pipe, below a notebook's kernel."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# All that rich draws more than once, on both streams.
PROGRAM = """\
from rich.live import Live
from rich.progress import Progress
from phalanx.system.console import has_styles, make_console

for console in (make_console(), make_console(stderr=True)):
    console.print(f"terminal {console.is_terminal}, styles {has_styles(console)}", style="red")
    with console.status("waiting"):
        console.print("in the meantime")
    with Progress(console=console) as progress:
        progress.advance(progress.add_task("moving", total=2))
    if console.is_terminal:
        with Live("alone", console=console, screen=True):
            pass
"""
# What decides about a terminal, in any environment in which the tests run.
NEUTRAL = {
    "TERM": "xterm-256color",
    **dict.fromkeys(
        ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JPY_PARENT_PID", "PAGER")
    ),
}
COLOR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def environment(changes: dict[str, str]) -> dict[str, str]:
    changed: dict[str, str | None] = {**os.environ, **NEUTRAL, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def run(changes: dict[str, str], *, on_terminal: bool) -> str:
    """Return what the program writes to a terminal, or to a pipe."""
    command = [sys.executable, "-c", PROGRAM]
    if not on_terminal:
        ended = subprocess.run(
            command,
            env=environment(changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=60,
        )
        return ended.stdout.decode()
    control, terminal = pty.openpty()
    with subprocess.Popen(
        command, env=environment(changes), stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        written = b"".join(read_all(control))
        assert process.wait(60) == 0, written
    os.close(control)
    return written.decode().replace("\r\n", "\n")


def read_all(fd: int) -> Iterator[bytes]:
    try:
        while data := os.read(fd, 1 << 16):
            yield data
    except OSError:  # all have closed the terminal
        return


@pytest.mark.parametrize(
    ("changes", "on_terminal", "has_colors"),
    [
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, False),
        ({"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}, False, True),
        ({"TERM": "dumb"}, True, False),
        # A command in a cell of a notebook, in JupyterLab and in a kernel of another front end.
        ({"FORCE_COLOR": "1", "TERM": "xterm-color", "JPY_PARENT_PID": "7"}, True, True),
        ({"FORCE_COLOR": "1", "TERM": "xterm-color", "PAGER": "cat"}, True, True),
    ],
)
def test_only_a_terminal_is_redrawn(
    changes: dict[str, str], on_terminal: bool, has_colors: bool
) -> None:
    written = run(changes, on_terminal=on_terminal)
    assert bool(COLOR.search(written)) == has_colors
    text = COLOR.sub("", written)
    assert not CONTROL.search(text), repr(text)
    assert text.count(f"terminal False, styles {has_colors or on_terminal}\n") == 2
    assert text.count("in the meantime\n") == 2
    assert "waiting" not in text
    assert "alone" not in text


def test_a_terminal_is_redrawn() -> None:
    written = run({}, on_terminal=True)
    assert "terminal True, styles True" in written
    assert "waiting" in written
    assert "\x1b[?1049h" in written
    without_color = run({"NO_COLOR": "1"}, on_terminal=True)
    assert "\x1b[?1049h" in without_color
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", without_color)


class WithoutTerminal:
    """A stream of a user, which has only what `print` needs."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_a_replaced_stream_needs_no_isatty(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.system.console import make_console

    monkeypatch.setattr(os, "environ", environment({}))
    stream = WithoutTerminal()
    monkeypatch.setattr(sys, "stdout", stream)
    make_console().print("text", style="red")
    assert stream.text == "text\n"


def test_consoles_on_standard_streams_are_made_in_one_place() -> None:
    from phalanx import system

    factory = Path(system.__file__).parent / "console.py"
    for path in factory.parents[1].rglob("*.py"):
        for call in re.findall(r"\bConsole\(([^)]*)", path.read_text()):
            assert "file=" in call or path == factory, f"{path}: use make_console"
