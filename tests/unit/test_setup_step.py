"""tools/setup_step.py: progress of a step of the set-up, and its output if it fails."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from tools import setup_step


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_step_that_succeeds_says_how_long_it_took_and_nothing_else() -> None:
    out = io.StringIO()
    assert setup_step.run(python("print('noise')"), out) == 0
    assert re.fullmatch(r"   done in \d+ s\n", out.getvalue())


def test_a_step_that_fails_shows_its_output_and_exit_code() -> None:
    out = io.StringIO()
    code = "import sys; print('first'); print('second', file=sys.stderr); sys.exit(7)"
    assert setup_step.run(python(code), out) == 7
    lines = out.getvalue().splitlines()
    assert {"first", "second"} <= {*lines}
    assert re.match(r"   failed after \d+ s, with exit code 7: ", lines[-1])


def test_a_step_that_is_killed_fails() -> None:
    out = io.StringIO()
    assert setup_step.run(python("import os; os.kill(os.getpid(), 9)"), out) == 137


class Screen(io.StringIO):
    """A stream that lets the step end once it has shown the last line of the step's output."""

    def __init__(self, release: Path, *, is_terminal: bool) -> None:
        super().__init__()
        self.release, self.is_terminal = release, is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        if "compiling 2 of 9" in text:
            self.release.touch()
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_the_time_and_the_last_line_of_the_output(
    tmp_path: Path, is_terminal: bool
) -> None:
    screen = Screen(tmp_path / "release", is_terminal=is_terminal)
    code = (
        "import os, time; print('compiling 1 of 9'); print('compiling 2 of 9\\n', flush=True)\n"
        f"while not os.path.exists({str(screen.release)!r}): time.sleep(0.01)"
    )
    assert setup_step.run(python(code), screen, line_seconds=0.05) == 0
    progress, done = screen.getvalue().rsplit("compiling 2 of 9", 1)
    if is_terminal:  # one line, which is cleared
        assert re.search(r"\r\x1b\[K   \d+ s: $", progress)
        assert "\n" not in progress
        assert re.fullmatch(r"\r\x1b\[K   done in \d+ s\n", done)
    else:
        assert re.search(r"^   \d+ s: $", progress, re.MULTILINE)
        assert re.fullmatch(r"\n   done in \d+ s\n", done)
