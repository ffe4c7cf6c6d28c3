"""Exit codes of commands, as docs/reference/exceptions.md lists them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.docs.sessions import run

EXCEPTION = "raise ValueError"
EXIT = "import sys; sys.exit(7)"
KILL = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("phalanx jobs", 0),
        ("phalanx jobs --unknown", 2),
        ("phalanx explain absent", 2),
        ("phalanx bench --from absent.json --plot plot.png", 2),
        ("phalanx run absent.py", 2),
    ],
)
def test_commands(command: str, code: int, tmp_path: Path) -> None:
    assert run(command, tmp_path).returncode == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code"), [(EXCEPTION, 1), (EXIT, 7), (KILL, 128 + signal.SIGKILL)]
)
def test_ranks(program: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    ended = run("phalanx run --nproc-per-node 1 program.py", tmp_path)
    assert ended.returncode == code, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        f"import os, time; os.kill({{}}, {int(number)}); time.sleep(60)".format("os.getppid()")
    )
    ended = run(f"exec {sys.executable} -m phalanx run --nproc-per-node 1 program.py", tmp_path)
    assert ended.returncode == 128 + number, ended.stderr
