"""Hosts that cannot start ranks: the launcher reports one error and leaves no job behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launcher.host_resources import check_host

LIMIT = 60
COMMANDS = {
    "phalanx run": "from phalanx.cli import main; main()",
    "phalanx.launch": "import phalanx; phalanx.launch(print, 2)",
}
UNSHARE = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
HIDE_PROC = 'mount -t tmpfs none /proc && exec "$@"'
UNFIT_HOSTS = {
    "few files": (
        ["sh", "-c", 'ulimit -n 30; exec "$@"', "sh"],
        "this process may have 30 files open and has ",
        " to start 2 ranks: raise the limit, for example with `ulimit -n 1024`\n",
    ),
    "no /proc": (
        [*UNSHARE, HIDE_PROC, "sh"],
        "can't read /proc/self/fd (No such file or directory): Phalanx needs /proc to ",
        "; mount it, for example with `mount -t proc proc /proc`\n",
    ),
}


def can_hide_proc() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*UNSHARE, HIDE_PROC, "sh", "true"], timeout=LIMIT).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("reason", UNFIT_HOSTS)
def test_an_unfit_host_is_one_error(command: str, reason: str, tmp_path: Path, jobs: Path) -> None:
    if reason == "no /proc" and not can_hide_proc():
        pytest.skip("this machine does not permit a mount over /proc")
    prefix, start, end = UNFIT_HOSTS[reason]
    script = tmp_path / "script.py"
    script.touch()
    arguments = [*prefix, sys.executable, "-c", COMMANDS[command]]
    if command == "phalanx run":
        arguments += ["run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 1
    if command == "phalanx run":
        assert done.stderr.startswith(f"phalanx: error: {start}"), done.stderr
    else:
        assert f"\nphalanx.errors.LaunchError: {start}" in done.stderr, done.stderr
        assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith(end)
    assert not jobs.exists()


def test_enough_files_for_many_ranks() -> None:
    check_host(128)


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path: Path, jobs: Path) -> None:
    """It limits shared memory too, which nobody expects."""
    script = tmp_path / "script.py"
    script.write_text("import phalanx\nwith phalanx.init():\n    pass\n")
    command = [sys.executable, "-c", COMMANDS["phalanx run"], "run", "--nproc-per-node", "2"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 100; exec "$@"', "sh", *command, str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 1
    assert "File too large: raise `ulimit -f`, which limits shared memory too\n" in done.stderr
