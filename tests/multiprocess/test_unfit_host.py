"""Hosts on which no rank can be started: one error of the launcher, and nothing left behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launcher.requirements import check_host

LIMIT = 60
COMMANDS = {
    "phalanx run": "from phalanx.cli import main; main()",
    "phalanx.launch": "import phalanx; phalanx.launch(print, 2)",
}
NO_PROC = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
HIDDEN = 'mount -t tmpfs none /proc && exec "$@"'
UNFIT = {
    "few files": (
        ["sh", "-c", 'ulimit -n 30; exec "$@"', "sh"],
        "this process may have 30 files open and has ",
        " to start 2 ranks: raise the limit, for example with `ulimit -n 1024`\n",
    ),
    "no /proc": (
        [*NO_PROC, HIDDEN, "sh"],
        "can't read /proc/self/fd (No such file or directory): Phalanx needs /proc to ",
        "; mount it, for example with `mount -t proc proc /proc`\n",
    ),
}


def can_hide_proc() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*NO_PROC, HIDDEN, "sh", "true"], timeout=LIMIT).returncode == 0
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("unfit", UNFIT)
def test_one_clear_error(command: str, unfit: str, tmp_path: Path, jobs: Path) -> None:
    if unfit == "no /proc" and not can_hide_proc():
        pytest.skip("this machine lets nobody mount over /proc")
    before, begin, end = UNFIT[unfit]
    script = tmp_path / "script.py"
    script.touch()
    words = [*before, sys.executable, "-c", COMMANDS[command]]
    if command == "phalanx run":
        words += ["run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 1
    if command == "phalanx run":
        assert done.stderr.startswith(f"phalanx: error: {begin}"), done.stderr
    else:
        assert f"\nphalanx.errors.LaunchError: {begin}" in done.stderr, done.stderr
        assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith(end)
    assert not jobs.exists()


def test_enough_files_for_many_ranks() -> None:
    check_host(128)
