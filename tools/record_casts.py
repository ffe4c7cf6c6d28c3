"""Record the terminal pictures of the documentation: python tools/record_casts.py [DIRECTORY].

The default directory is docs/pictures. Each picture is a recording of real commands on a terminal
of their own: a training whose rank 1 is killed by SIGKILL (failure.svg), and `phalanx watch` on a
training whose rank 2 is slow (watch.svg). The timeline of the second job is written to
straggler.pftrace in the current directory if `--trace` is given.

The output is shown as it was printed, with these exceptions: the commands run in a namespace in
which the host is called node-a, and the explanation that `phalanx run` prints is folded to one
line, because `phalanx explain` prints it again. Text stays text in the files. They play as
animations; a viewer that does not animate, or whose user prefers reduced motion, shows the last
frame.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

DIRECTORY = Path(__file__).parents[1] / "docs" / "pictures"
HOST = "node-a"
LIMIT = 120.0
"""Seconds for which the script waits for anything."""

PROGRAM = """\
import os
import time

import torch
import torch.distributed as dist

import phalanx

delayed_rank = int(os.environ.get("DELAYED_RANK", "-1"))

with phalanx.init() as session:
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    for step in range(1, 1_000_000):
        inputs = torch.randn(32, 512)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        time.sleep(0.24 if session.rank == delayed_rank else 0.04)
        dist.all_reduce(model.weight.grad)
        with torch.no_grad():
            model.weight -= 10 * model.weight.grad / session.world_size
        model.zero_grad()
        phalanx.report(step=step, loss=loss.item())
        if session.is_main and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
"""

THEME = TerminalTheme(
    (13, 17, 23),
    (214, 221, 229),
    [
        (110, 118, 129),
        (255, 123, 114),
        (87, 211, 120),
        (227, 179, 65),
        (121, 192, 255),
        (210, 168, 255),
        (86, 212, 221),
        (214, 221, 229),
    ],
)
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
CELL, LINE, MARGIN, TOP = 8.0, 17.0, 14.0, 34.0
"""Width of a character, height of a line, margins, and height of the title bar, in pixels."""


# ---- terminals ----


class Terminal:
    """A command on a terminal of its own, on a host that is called node-a."""

    def __init__(self, command: str, columns: int, rows: int, **variables: str) -> None:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {
            **os.environ,
            **variables,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TERM": "xterm-256color",
        }
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        script = f"hostname {HOST} && exec {command}"
        self._process = subprocess.Popen(
            ["unshare", "--map-root-user", "--uts", "sh", "-c", script],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=environment,
            start_new_session=True,
        )
        os.close(follower)
        self._leader = leader
        self.output = ""

    def read_until(self, is_complete: Callable[[str], bool]) -> None:
        """Read until the output satisfies a condition, or the command has ended."""
        deadline = time.monotonic() + LIMIT
        while not is_complete(self.output):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._leader], [], [], left)[0]:
                raise TimeoutError(f"no end in {LIMIT} s after: {self.output[-500:]}")
            try:
                data = os.read(self._leader, 65536)
            except OSError:  # Linux reports the end of the other side of a terminal as EIO
                return
            self.output += data.decode(errors="replace")

    def read_all(self) -> str:
        """Read until the command ends, and return its output."""
        self.read_until(lambda _: False)
        self._process.wait(LIMIT)
        return self.output

    def interrupt(self) -> None:
        """End the command as Ctrl-C does, if it has not ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(LIMIT)
        finally:
            os.close(self._leader)


@contextlib.contextmanager
def open_terminal(
    command: str, columns: int, rows: int = 50, **variables: str
) -> Iterator[Terminal]:
    """Run a command on a terminal, and interrupt it at the end."""
    terminal = Terminal(command, columns, rows, **variables)
    try:
        yield terminal
    finally:
        terminal.interrupt()


def read_pid(rank: int) -> int:
    """Return the pid of a rank of the newest job."""
    from phalanx.diagnosis.job_reader import read_job

    pid = read_job(None).ranks[rank].pid
    assert pid, f"rank {rank} has no process"
    return int(pid)


# ---- pictures ----


@dataclass(frozen=True)
class Frame:
    """Lines with ANSI sequences, and the seconds for which they are shown."""

    lines: list[str]
    seconds: float


def render_frame(lines: list[str], columns: int, first: int = 0) -> str:
    """Return SVG elements for lines, of which the first has the index `first`."""
    console = Console(width=columns, color_system="truecolor", file=sys.stderr)
    parts = []
    for number, line in enumerate(lines, first):
        column = 0
        baseline = TOP + MARGIN + LINE * (number + 0.75)
        for segment in console.render_lines(Text.from_ansi(line, end=""), pad=False)[0]:
            # Renderers collapse spaces: words with more than one between them get their own places.
            for part in re.finditer(r"\S+(?: \S+)*", segment.text):
                x = MARGIN + CELL * (column + part.start())
                parts.append(_render_text(part[0], segment.style or Style(), x, baseline))
            column += segment.cell_length
    return "".join(parts)


def _render_text(text: str, style: Style, x: float, y: float) -> str:
    """Return a text of fixed length, so that columns are aligned in any font."""
    attributes = f'x="{x:g}" y="{y:g}" textLength="{CELL * len(text):g}"'
    if style.color is not None and style.color != Color.default():
        attributes += f' fill="{style.color.get_truecolor(THEME).hex}"'
    if style.dim:
        attributes += ' fill-opacity="0.65"'
    if style.bold:
        attributes += ' font-weight="bold"'
    return f"<text {attributes}>{escape(text, quote=False)}</text>\n"


def wrap_picture(body: str, style: str, title: str, columns: int, rows: int) -> str:
    """Return the SVG of a terminal window."""
    width, height = 2 * MARGIN + CELL * columns, TOP + 2 * MARGIN + LINE * rows
    middle = width / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="{FONT}" font-size="13" '
        f'fill="{THEME.foreground_color.hex}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="8" '
        f'fill="{THEME.background_color.hex}"/>\n'
        f'<g font-size="12" text-anchor="middle" fill="{THEME.ansi_colors[0].hex}">'
        f'<circle cx="18" cy="17" r="5"/><circle cx="36" cy="17" r="5"/>'
        f'<circle cx="54" cy="17" r="5"/><text x="{middle:g}" y="21">{escape(title)}</text></g>\n'
        f"{body}</svg>\n"
    )


def draw_growing(parts: list[Frame], title: str, columns: int) -> str:
    """Draw parts that light up one below the other, once."""
    style = "@media (prefers-reduced-motion: no-preference) {\n"
    body, begin, row = "", 0.0, 0
    for number, part in enumerate(parts):
        body += f'<g id="p{number}">\n{render_frame(part.lines, columns, row)}</g>\n'
        style += f"#p{number} {{ animation: appear 0.2s {begin:g}s backwards }}\n"
        row, begin = row + len(part.lines), begin + part.seconds
    style += "}\n@keyframes appear { from { opacity: 0.25 } to { opacity: 1 } }\n"
    return wrap_picture(body, style, title, columns, row)


def draw_replacing(frames: list[Frame], title: str, columns: int) -> str:
    """Draw frames that replace each other, over and over; the last one is the picture at rest."""
    total, begin = sum(frame.seconds for frame in frames), 0.0
    style, body = "@media (prefers-reduced-motion: no-preference) {\n", ""
    keyframes = ""
    for number, frame in enumerate(frames):
        start, end = begin / total * 100, (begin + frame.seconds) / total * 100
        is_last = number == len(frames) - 1
        hidden = "" if is_last else ' visibility="hidden"'
        body += f'<g id="f{number}"{hidden}>\n{render_frame(frame.lines, columns)}</g>\n'
        style += f"#f{number} {{ animation: show{number} {total:g}s step-end infinite }}\n"
        steps = {0.0: "hidden", start: "visible"} | ({} if is_last else {end: "hidden"})
        keyframes += f"@keyframes show{number} {{ " + " ".join(
            f"{percent:.2f}% {{ visibility: {value} }}" for percent, value in steps.items()
        )
        keyframes += " }\n"
        begin += frame.seconds
    rows = max(len(frame.lines) for frame in frames)
    return wrap_picture(body, f"{style}}}\n{keyframes}", title, columns, rows)


# ---- recordings ----


def prompt(command: str) -> str:
    """Return a line in which a user enters a command."""
    return f"\x1b[32m$\x1b[0m {command}"


def split_lines(output: str, columns: int) -> list[str]:
    """Return the lines of a terminal, wrapped at its width."""
    console = Console(width=columns, color_system="truecolor", file=sys.stderr)
    lines: list[str] = []
    for line in output.replace("\r", "").rstrip("\n").split("\n"):
        text = Text.from_ansi(line, end="")
        text.rstrip()
        # As a terminal wraps: at the width, and not at words.
        cuts = range(columns, len(text), columns)
        for piece in text.divide(cuts) if len(text) > columns else [text]:
            with console.capture() as captured:
                console.print(piece, soft_wrap=True, highlight=False)
            lines.append(captured.get().rstrip("\n"))
    return lines


def record_failure(columns: int = 108) -> str:
    """Record a training whose rank 1 is killed, and the explanation of its end."""
    command = "phalanx run --nproc-per-node 3 train.py"
    with open_terminal(command, columns) as terminal:
        terminal.read_until(lambda output: "step 60:" in output)
        pid = read_pid(1)
        before = terminal.output
        os.kill(pid, signal.SIGKILL)
        after = terminal.read_all()[len(before) :]
    with open_terminal("phalanx explain", columns) as terminal:
        explanation = split_lines(terminal.read_all(), columns)
    report, rest = after.split("\r\n\r\nJob ", 1)
    lines = split_lines(f"Job {rest}", columns)
    hints = [line for line in lines if line.startswith("To see ")]
    folded = len(lines) - len(hints)
    aside = f"\x1b[2m... {folded} lines of explanation, which `phalanx explain` prints again\x1b[0m"
    parts = [
        Frame([prompt(command)], 1.0),
        *(Frame([line], 0.6) for line in split_lines(before, columns)),
        Frame(["", f"\x1b[2m(in another terminal)\x1b[0m {prompt(f'kill -9 {pid}')}", ""], 1.5),
        Frame([*split_lines(report, columns), aside, *hints, ""], 2.0),
        Frame([prompt("phalanx explain")], 1.0),
        Frame(explanation, 1.0),
    ]
    return draw_growing(parts, f"A rank is killed - {HOST}", columns)


def record_watch(trace: bool, columns: int = 116, rows: int = 8) -> str:
    """Record `phalanx watch` on a training whose rank 2 is slow."""
    with open_terminal(
        "phalanx run --nproc-per-node 4 train.py", columns, DELAYED_RANK="2"
    ) as training:
        training.read_until(lambda output: "step 20:" in output)
        with open_terminal("phalanx watch", columns, rows) as terminal:
            terminal.read_until(lambda output: output.count("\x1b[H") >= 10)
            output = terminal.output
        if trace:
            with open_terminal("phalanx trace -o straggler.pftrace", columns) as exporting:
                exporting.read_all()
    # A frame begins at the upper left; the last one may be incomplete.
    screens = output.split("\x1b[H")[2:-1]
    frames = []
    for screen in screens:
        lines = [line.rstrip() for line in screen.replace("\r", "").split("\n")]
        while lines and not Text.from_ansi(lines[-1]).plain.strip():
            lines.pop()
        frames.append(Frame([prompt("phalanx watch"), *lines], 1.0))
    frames[-1] = Frame(frames[-1].lines, 3.0)
    return draw_replacing(frames, f"A rank is slow - {HOST}", columns)


def main() -> None:
    """Record both pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", nargs="?", type=Path, default=DIRECTORY)
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    directory, home = options.directory.resolve(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PHALANX_JOBS_DIR"] = f"{folder}/jobs"
        os.chdir(folder)
        Path("train.py").write_text(PROGRAM)
        pictures = {"failure": record_failure(), "watch": record_watch(options.trace)}
        if options.trace:
            (home / "straggler.pftrace").write_bytes(Path("straggler.pftrace").read_bytes())
        os.chdir(home)
    for name, picture in pictures.items():
        (directory / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
