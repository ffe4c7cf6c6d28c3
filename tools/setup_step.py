"""Run one step of the set-up: show how far it is, and its output only if it fails.

    python tools/setup_step.py COMMAND [ARGUMENT ...]

The Makefile calls this for steps that take minutes. On a terminal, a line shows the time that the
step has taken and the last line of its output; elsewhere, such a line is printed every 30 seconds.
It needs nothing but Python, since nothing is installed yet.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

TERMINAL_SECONDS = 0.5
"""The time between two updates of the line on a terminal, in seconds."""
LINE_SECONDS = 30.0
"""The time between two lines elsewhere, in seconds."""
_CLEAR = "\r\x1b[K"


def format_duration(seconds: float) -> str:
    """Format a duration: "7 s", "2 min 5 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def run(command: Sequence[str], out: TextIO, *, line_seconds: float = LINE_SECONDS) -> int:
    """Run a command without input, and return its exit code; 128 and a signal's number if killed.

    Args:
        command: The program and its arguments.
        out: The stream for the progress and, if the command fails, for its output.
        line_seconds: The time between two lines if `out` is not a terminal, in seconds.
    """
    began = time.monotonic()
    output: list[str] = []
    is_terminal = out.isatty()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=output.extend, args=(process.stdout,))
        reader.start()
        try:
            while True:
                reader.join(TERMINAL_SECONDS if is_terminal else line_seconds)
                if not reader.is_alive():
                    break
                _show(out, time.monotonic() - began, output, is_terminal=is_terminal)
            code = process.wait()
        finally:
            if is_terminal:
                out.write(_CLEAR)
                out.flush()
    took = format_duration(time.monotonic() - began)
    if code == 0:
        print(f"   done in {took}", file=out, flush=True)
        return 0
    out.writelines(output)
    code = 128 - code if code < 0 else code
    print(
        f"   failed after {took}, with exit code {code}: {' '.join(command)}", file=out, flush=True
    )
    return code


def _show(out: TextIO, seconds: float, output: Sequence[str], *, is_terminal: bool) -> None:
    last = next((line.strip() for line in reversed(output) if line.strip()), "")
    text = f"   {format_duration(seconds)}" + (f": {last}" if last else "")
    text = text[: shutil.get_terminal_size().columns - 1]
    out.write(f"{_CLEAR}{text}" if is_terminal else f"{text}\n")
    out.flush()


def main(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, and return the exit code."""
    if not arguments:
        print("usage: python tools/setup_step.py COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    try:
        return run(arguments, sys.stdout)
    except KeyboardInterrupt:  # which the command has got too
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
