"""Sessions in a console: each command runs, and prints what the page shows.

Output that contains lines `...` shows parts: each part must occur in the output, whatever the
breaks of its lines. Otherwise every line must occur, in any order, since ranks print in any order.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.docs.fences import Fence

LIMIT = 100.0
# The width of the terminal that the pages show.
_SHELL = {"COLUMNS": "80"}


def run(command: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a page as a shell does that finds `phalanx` and `python`.

    One that needs nothing else of a shell is started without it, as a copy if launchers are.
    """
    programs = Path(sys.executable).parent
    words = command.split()
    arguments = ["bash", "-o", "pipefail", "-c", command]
    if words[0] == "phalanx" and re.fullmatch(r"[\w ./:=,-]+", command):
        arguments = [str(programs / "phalanx"), *words[1:]]
    path = f"{programs}:{os.environ['PATH']}"
    jobs = str(directory / ".jobs")
    return subprocess.run(
        arguments,
        cwd=directory,
        env={**os.environ, **_SHELL, "PATH": path, "PHALANX_JOBS_DIR": jobs, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def mask(line: str, fence: Fence) -> str:
    """Replace what varies in a line."""
    if "numbers vary" in fence.comment:
        line = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node-a", line)
        line = re.sub(r"\b\d{8}-\d{4}-\w{6}\b", "JOB", line)
        return re.sub(r"\d+(?:[.,:]\d+)*", "N", line)
    if "digits vary" in fence.comment:
        # The trainer prints its speed only if there was enough time to measure it.
        line = re.sub(r"  [\d,]+ samples/s  waiting \d+%", "", line)
        return re.sub(r"\d+\.\d+|\d+(?=%)|(?<=pid )\d+|(?<=, )\S*(?=runs/digits)", "N", line)
    return line


def check_session(fence: Fence, directory: Path) -> None:
    """Run the commands of a session one after another, and compare their output."""
    for command, expected in fence.commands:
        ended = run(command, directory)
        assert ended.returncode == fence.exit_code, f"{command}\n{ended.stdout}{ended.stderr}"
        if not expected:
            continue
        if "output varies" in fence.comment:
            headings = {line.split()[0] for line in expected if line[0].isalpha()}
            assert headings <= {line.partition(" ")[0] for line in ended.stdout.splitlines()}
            continue
        shown = [mask(line, fence) for line in expected]
        if "..." in shown:
            found = _join([mask(line, fence) for line in (ended.stderr + ended.stdout).split("\n")])
            for part in "\n".join(shown).split("..."):
                assert _join(part.split("\n")) in found, f"{command}\n{part}\nnot in {found}"
        else:
            printed = ended.stdout.splitlines()
            assert sorted(mask(line, fence) for line in printed) == sorted(shown), command


def _join(lines: list[str]) -> str:
    return " ".join(" ".join(lines).replace("─", "").split())
