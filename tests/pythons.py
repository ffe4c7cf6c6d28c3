"""Build and install the wheel and run the self-check on every Python of this machine.

`make pythons` runs it. With `--wheels DIRECTORY` it builds none, and installs those of a release.
Each Python has its own environment in build/pythons, which is kept for the next run; the output of
all steps goes to a log beside it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.interpreters import interpreters

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "pythons"
SUPPORTED = range(10, 15)  # minor versions of Python 3
STEP_LIMIT = 1800


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("make pythons", description=__doc__)
    parser.add_argument("--torch", required=True, help="the version of PyTorch to install")
    parser.add_argument("--only", metavar="3.N", help="the only version of Python to use")
    parser.add_argument("--wheels", type=Path, help="the directory with the wheels of a release")
    return parser.parse_args()


def main() -> int:
    arguments, failed = parse_options(), False
    print(f"| Python | torch {arguments.torch} | seconds |", "| --- | --- | ---: |", sep="\n")
    for minor in SUPPORTED:
        name = f"3.{minor}"
        if arguments.only in (None, name):
            python = next(interpreters(minor), None)
            start = time.monotonic()
            version, outcome = check(python, name, arguments) if python else (name, "not found")
            failed |= python is not None and outcome != "passed"
            print(f"| {version} | {outcome} | {time.monotonic() - start:.0f} |", flush=True)
    return failed


def check(python: str, name: str, options: argparse.Namespace) -> tuple[str, str]:
    """Return the full version of a Python, and "passed" or the step that failed."""
    command = [python, "-c", "import platform; print(platform.python_version())"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    environment, wheels = FOLDER / name, FOLDER / f"{name}-wheel"
    bin_folder, log = environment / "bin", FOLDER / f"{name}.log"
    shutil.rmtree(wheels, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [str(bin_folder / "python"), "-m", "pip", "--disable-pip-version-check"]
    pinned = f"torch=={options.torch}"
    wheel = [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels)]
    if options.wheels:
        wheel += ["--no-index", "--find-links", str(options.wheels.resolve()), "phalanx"]
    else:
        wheel.append(str(ROOT))
    steps = {
        "make an environment": [python, "-m", "venv", str(environment)],
        "get the wheel": wheel,
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
