"""The check for leftover processes in `tests/conftest.py`, run on tests that leave one."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

HEADER = "import pathlib\nimport subprocess\n\nimport pytest\n"
LEAVES_CHILD = """
def test_it():
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("pid").write_text(str(child.pid))
"""
LEAVES_ORPHAN = """
def test_it():
    script = "sleep 600 > /dev/null & echo $!"
    with open("pid", "w") as pid:
        subprocess.run(["sh", "-c", script], stdout=pid, start_new_session=True)
"""
ENDS_LATE = """
def test_it():
    subprocess.Popen(["sleep", "0.2"])
"""
FIXTURE_LEAVES_CHILD = """
@pytest.fixture(scope="module")
def server():
    return subprocess.Popen(["sleep", "600"])


def test_first(server):
    pass


def test_second(server):
    pass
"""


def run_pytest(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run `source` as a test module with the project's conftest.py, in a separate folder."""
    conftest = (Path(__file__).parents[1] / "conftest.py").read_text()
    assert "GRACE = 5.0" in conftest
    (folder / "conftest.py").write_text(conftest.replace("GRACE = 5.0", "GRACE = 1.0"))
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(HEADER + source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("source", [LEAVES_CHILD, LEAVES_ORPHAN], ids=["child", "orphan"])
def test_a_process_left_behind_fails_the_test_and_is_killed(tmp_path: Path, source: str) -> None:
    result = run_pytest(tmp_path, source)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout + result.stderr
    assert "left running" in result.stdout
    assert "sleep 600" in result.stdout
    assert "1 passed, 1 error" in result.stdout
    pid = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_left_by_a_fixture_fails_the_run(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, FIXTURE_LEAVES_CHILD)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout + result.stderr
    assert "2 passed, 1 error" in result.stdout
    assert "sleep 600" in result.stdout


def test_a_process_that_ends_in_time_is_accepted(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, ENDS_LATE)
    assert result.returncode == pytest.ExitCode.OK, result.stdout + result.stderr
