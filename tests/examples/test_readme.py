"""The examples in the README produce the output shown."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 100


def blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_first_example_prints_shown_output(repository: Path, tmp_path: Path) -> None:
    script = next(block for block in blocks(repository, "python") if "phalanx.init" in block)
    session = next(block for block in blocks(repository, "console") if "hello.py" in block)
    (tmp_path / "hello.py").write_text(script)
    shown = {}
    for part in session.split("$ ")[1:]:
        command, _, output = part.partition("\n")
        shown[command.split()[0]] = (command.split()[1:], output.splitlines())
    phalanx = [sys.executable, "-c", "from phalanx.cli import main; main()"]
    for name, program in (("phalanx", phalanx), ("python", [sys.executable])):
        arguments, expected = shown[name]
        result = subprocess.run(
            [*program, *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd=tmp_path,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert sorted(result.stdout.splitlines()) == expected
