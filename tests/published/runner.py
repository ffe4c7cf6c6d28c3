"""Running of an example in its own folder."""

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
from tests.published.imports import change_imports

__all__ = ["RunResult", "copy", "run"]

_SUBSTITUTES = Path(__file__).parent / "substitutes"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RunResult:
    """The result of a run of an example.

    Attributes:
        lines: Lines on stdout of all processes.
        stderr_lines: Lines on stderr of all processes.
        losses: Losses in order, by process.
        seconds: Duration of the run.
        code: Exit code; None if the run exceeded its time limit and was killed.
    """

    lines: list[str]
    stderr_lines: list[str]
    losses: dict[str, list[float]]
    seconds: float
    code: int | None


def copy(examples: Path, case: Case, to: Path, is_changed: bool) -> int:
    """Copy an example into a folder; return the number of changed lines."""
    shutil.copytree(examples / "distributed" / "rpc" / case.folder, to / case.folder)
    lines = 0
    if is_changed:
        for path in (to / case.folder).rglob("*.py"):
            text, count = change_imports(path.read_text(encoding="utf-8"))
            path.write_text(text, encoding="utf-8")
            lines += count
    if case.needs_digits:
        digits.make(to / "data")
    return lines


def run(case: Case, folder: Path, limit: float, is_full: bool) -> RunResult:
    """Run an example that was copied to a folder.

    Args:
        case: The example.
        folder: Folder of the copy.
        limit: Time limit in seconds.
        is_full: Whether not to shorten the example.
    """
    losses = folder / "losses"
    losses.mkdir()
    start = time.monotonic()
    started = []
    for index, command in enumerate(case.commands):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(_SUBSTITUTES), str(_ROOT))),
            "OMP_NUM_THREADS": "1",
            "PUBLISHED_LOSSES": str(losses),
            "PUBLISHED_PROCESS": str(index),
            "PUBLISHED_RANDOM": "yes" if case.is_random else "no",
            "PUBLISHED_ACCELERATORS": str(case.accelerators),
            "PUBLISHED_SET": "{}" if is_full else json.dumps(case.values),
        }
        started.append(_start(command, folder, case.folder, index, environment))
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
    return RunResult(
        _lines(folder, "stdout"),
        _lines(folder, "stderr"),
        {path.name: _numbers(path) for path in sorted(losses.iterdir())},
        time.monotonic() - start,
        code,
    )


def _start(
    command: tuple[str, ...], folder: Path, inside: str, index: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    with (
        open(folder / f"{index}.stdout", "ab") as stdout,
        open(folder / f"{index}.stderr", "ab") as stderr,
    ):
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=folder / inside,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes that it started."""
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
