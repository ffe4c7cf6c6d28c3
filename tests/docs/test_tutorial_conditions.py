"""The tutorial's programs under adverse conditions: they work, or say in one line what to do.

`test_tutorial.py` runs them on other numbers of ranks and on Gloo.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.sessions import run

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parents[2] / "examples" / "tutorial"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))
ARGUMENTS = {"trainer": "runs/digits"}
EXTRAS = (
    "accelerate",
    "lightning",
    "matplotlib",
    "mpi4py",
    "perfetto",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboard",
    "zmq",
)
# Makes a directory read-only in a mount namespace of its own, as root ignores permissions.
MOUNT = 'mount --bind "$PWD" "$PWD" && mount -o remount,ro,bind "$PWD" && cd "$PWD" && '


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the programs of the tutorial."""
    return Path(shutil.copytree(PROGRAMS, tmp_path / "tutorial"))


def start(name: str, ranks: int = 2) -> str:
    """Return the command that starts a program."""
    launcher = "python" if name == "initialization" else f"phalanx run --nproc-per-node {ranks}"
    return f"{launcher} {name}.py {ARGUMENTS.get(name, '')}"


def check(ended: subprocess.CompletedProcess[str], advice: str = "") -> None:
    """Check that a program has worked or, if there is advice, ended with it and no traceback."""
    output = ended.stdout + ended.stderr
    if advice:
        assert ended.returncode == 1, output
        assert any(advice in line for line in ended.stderr.splitlines()), output
        assert "Traceback" not in output
    else:
        assert ended.returncode == 0, output


@pytest.fixture
def absent_extras(tmp_path: Path) -> Path:
    """A directory on the path in which the import of each extra fails."""
    absent = tmp_path / "absent"
    absent.mkdir()
    for extra in EXTRAS:
        error = f'raise ModuleNotFoundError("No module named {extra}", name="{extra}")\n'
        (absent / f"{extra}.py").write_text(error)
    return absent


@pytest.mark.parametrize("name", NAMES)
def test_without_extras_in_a_directory_that_cannot_be_written(
    name: str, directory: Path, tmp_path: Path, absent_extras: Path
) -> None:
    directory.chmod(0o555)
    command = start(name)
    if os.geteuid() == 0:
        command = f"unshare --mount sh -c {shlex.quote(MOUNT + command)}"
    variables = {"PHALANX_JOBS_DIR": str(tmp_path / "jobs"), "PYTHONPATH": str(absent_extras)}
    ended = run(command, directory, **variables)
    check(ended, "give a directory that this rank can write" if name == "trainer" else "")


def test_the_trainer_without_extras(directory: Path, absent_extras: Path) -> None:
    check(run(start("trainer"), directory, PYTHONPATH=str(absent_extras)))


@pytest.mark.parametrize("name", NAMES)
def test_in_a_notebook(name: str, directory: Path) -> None:
    """Its main part is a function of a cell: `__main__` has no file, and pickle cannot find it."""
    source = (directory / f"{name}.py").read_text()
    assert source.count('if __name__ == "__main__":') == 1
    arguments = ["program", *ARGUMENTS.get(name, "").split()]
    start_cell = "cell()" if name == "initialization" else "phalanx.launch(cell, 2)"
    (directory / "cell.txt").write_text(
        source.replace('if __name__ == "__main__":', "def cell():")
        + f"\n\nimport sys\nsys.argv = {arguments}\n{start_cell}\n"
    )
    ended = run(f'{shlex.quote(sys.executable)} -c "$(cat cell.txt)"', directory)
    check(ended, "a file, not a notebook" if name == "initialization" else "")
