"""Build and install the wheel and run the self-check on every Python of this machine.

`make pythons` runs it. Each Python has its own environment in build/pythons, which is kept for the
next run; the output of all steps goes to a log beside it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "pythons"
SUPPORTED = range(10, 15)  # minor versions of Python 3
STEP_LIMIT = 1800
# Where pyenv and uv install interpreters.
INTERPRETER_FOLDERS = (
    Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions",
    Path.home() / ".local" / "share" / "uv" / "python",
)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("make pythons", description=__doc__)
    parser.add_argument("--torch", required=True, help="the version of PyTorch to install")
    parser.add_argument("--only", metavar="3.N", help="the only version of Python to use")
    return parser.parse_args()


def main() -> int:
    arguments, failed = parse_options(), False
    print(f"| Python | torch {arguments.torch} | seconds |", "| --- | --- | ---: |", sep="\n")
    for minor in SUPPORTED:
        name = f"3.{minor}"
        if arguments.only in (None, name):
            python = next(interpreters(minor), None)
            start = time.monotonic()
            version, outcome = (
                check(python, name, arguments.torch) if python else (name, "not found")
            )
            failed |= python is not None and outcome != "passed"
            print(f"| {version} | {outcome} | {time.monotonic() - start:.0f} |", flush=True)
    return failed


def interpreters(minor: int) -> Iterator[str]:
    """Yield the interpreters of a version of Python, on the PATH, of pyenv and of uv.

    Interpreters that cannot create an environment are skipped.
    """
    name = f"python3.{minor}"
    candidates = [shutil.which(name)]
    for folder in INTERPRETER_FOLDERS:
        candidates += map(str, sorted(folder.glob(f"*/bin/{name}"), reverse=True))
    for candidate in filter(None, candidates):
        # pyenv puts a launcher on the PATH even for inactive versions, and Debian's Python has no
        # ensurepip unless python3-venv is installed.
        works = subprocess.run([candidate, "-c", "import ensurepip"], capture_output=True)
        if works.returncode == 0:
            yield candidate


def check(python: str, name: str, torch: str) -> tuple[str, str]:
    """Return the full version of a Python, and "passed" or the step that failed."""
    command = [python, "-c", "import platform; print(platform.python_version())"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    environment, wheels = FOLDER / name, FOLDER / f"{name}-wheel"
    bin_folder, log = environment / "bin", FOLDER / f"{name}.log"
    shutil.rmtree(wheels, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [str(bin_folder / "python"), "-m", "pip", "--disable-pip-version-check"]
    pinned = f"torch=={torch}"
    steps = {
        "make an environment": [python, "-m", "venv", str(environment)],
        "build the wheel": [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)],
        "install torch": [*pip, "install", pinned],
        "install the wheel": [*pip, "install", "--force-reinstall", "--no-deps"],
        "install what it requires": [*pip, "install", "phalanx", pinned],
        "phalanx test": [str(bin_folder / "phalanx"), "test"],
    }
    with log.open("w") as output:
        for step, command in steps.items():
            if step == "install the wheel":
                command = [*command, *map(str, wheels.glob("*.whl"))]  # noqa: PLW2901
            output.write(f"$ {' '.join(command)}\n")
            output.flush()
            try:
                subprocess.run(
                    command,
                    cwd=FOLDER,  # not the folder of the sources
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=STEP_LIMIT,
                    check=True,
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                return version, f"failed: {step}, see {log.relative_to(ROOT)}"
    return version, "passed"


if __name__ == "__main__":
    sys.exit(main())
