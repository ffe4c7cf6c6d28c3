"""Running an example in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.published import digits
from tests.published.cases import Case
from tests.published.imports import changed

__all__ = ["Ran", "copy", "run"]

_STAND_IN = Path(__file__).parent / "stand_in"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ran:
    """What a run of an example left.

    Attributes:
        lines: What it printed, by all processes.
        complaints: What it said on stderr.
        losses: Each loss, in order, by process.
        seconds: How long it took.
        code: Its exit code; None: it took too long and was ended.
    """

    lines: list[str]
    complaints: list[str]
    losses: dict[str, list[float]]
    seconds: float
    code: int | None


def copy(examples: Path, case: Case, to: Path, is_changed: bool) -> int:
    """Copy an example into a folder; returns how many lines were changed in it."""
    shutil.copytree(examples / "distributed" / "rpc" / case.folder, to / case.folder)
    lines = 0
    if is_changed:
        for path in (to / case.folder).rglob("*.py"):
            text, count = changed(path.read_text(encoding="utf-8"))
            path.write_text(text, encoding="utf-8")
            lines += count
    if case.digits:
        digits.make(to / "data")
    return lines


def run(case: Case, folder: Path, limit: float, is_full: bool) -> Ran:
    """Run an example that was copied to a folder.

    Args:
        case: Which.
        folder: Where it was copied to.
        limit: Seconds; then it is ended.
        is_full: Whether to leave it as long as it is.
    """
    losses = folder / "losses"
    losses.mkdir()
    start = time.monotonic()
    started = []
    for number, command in enumerate(case.commands):
        place = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(_STAND_IN), str(_ROOT))),
            "OMP_NUM_THREADS": "1",
            "PUBLISHED_LOSSES": str(losses),
            "PUBLISHED_WHO": str(number),
            "PUBLISHED_RANDOM": "yes" if case.is_random else "no",
            "PUBLISHED_ACCELERATORS": str(case.accelerators),
            "PUBLISHED_SET": "{}" if is_full else json.dumps(case.values),
        }
        started.append(_start(command, folder, case.folder, number, place))
    end = start + limit
    code: int | None = 0
    try:
        for process in started:
            code = process.wait(max(0.1, end - time.monotonic())) or code
    except subprocess.TimeoutExpired:
        code = None
    finally:
        for process in started:
            _end(process)
    return Ran(
        _lines(folder, "stdout"),
        _lines(folder, "stderr"),
        {path.name: _numbers(path) for path in sorted(losses.iterdir())},
        time.monotonic() - start,
        code,
    )


def _start(
    command: tuple[str, ...], folder: Path, inside: str, number: int, place: dict[str, str]
) -> subprocess.Popen[bytes]:
    with (
        open(folder / f"{number}.stdout", "ab") as stdout,
        open(folder / f"{number}.stderr", "ab") as stderr,
    ):
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=folder / inside,
            env=place,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(folder: Path, kind: str) -> list[str]:
    text = "\n".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(folder.glob(f"*.{kind}"))
    )
    return [line for line in text.splitlines() if line.strip()]


def _numbers(path: Path) -> list[float]:
    return [float(each) for each in path.read_text(encoding="utf-8").split()]
