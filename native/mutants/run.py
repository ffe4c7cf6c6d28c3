"""Seed one mistake at a time into a copy of the core, and check that it is found. See README.md.

usage: run.py [--check] [--only WORD...] [--jobs N] [--record]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutant import Mutant
from mutants import MUTANTS

NATIVE = Path(__file__).resolve().parents[1]
ROOT = NATIVE.parent
WORK = ROOT / "build" / "mutants"
SOURCE = WORK / "source"
# Seconds for finding one mutant, many times as long as the longest test takes without one.
LIMITS = {"plain": 120, "thread": 600, "model": 600}
SANITIZERS = {"plain": "", "thread": "thread"}
RESULT = NATIVE / "mutants" / "RESULT.md"
TABLE = ["| mutant | found by | s | output |", "|---|---|---:|---|"]
MISSED = "**nothing: NOT FOUND**"


class NotFoundError(Exception):
    """A mutant that does not apply or compile, or that nothing finds."""


@dataclass
class Finding:
    seconds: float
    output: str


def mutated(mutant: Mutant, text: str) -> str:
    for old, new in mutant.changes:
        if text.count(old) != 1:
            raise NotFoundError(
                f"{mutant.name}: {mutant.file} contains the text below {text.count(old)} times, "
                f"expected once. The source has changed; adapt the mutant:\n{old}"
            )
        text = text.replace(old, new)
    return text


@contextmanager
def seeded(mutant: Mutant) -> Iterator[None]:
    file = SOURCE / "native" / mutant.file
    original = file.read_text()
    file.write_text(mutated(mutant, original))
    try:
        yield
    finally:
        file.write_text(original)


def run(command: list[str | Path], limit: float = 600) -> subprocess.CompletedProcess[str]:
    # One race is enough; printing all of them takes minutes.
    return subprocess.run(
        ["nice", *command],
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
        env={"TSAN_OPTIONS": "halt_on_error=1", **os.environ},
    )


def build(kind: str, test: str, jobs: int) -> None:
    directory = WORK / kind
    if not (directory / "build.ninja").exists():
        options = ["-DPHALANX_PYTHON=OFF", "-DPHALANX_TESTS=ON"]
        options += [f"-DPHALANX_SANITIZE={SANITIZERS[kind]}", "-G", "Ninja"]
        subprocess.run(
            ["cmake", "-S", SOURCE, "-B", directory, *options], check=True, capture_output=True
        )
    built = run(["cmake", "--build", directory, "--parallel", str(jobs), "--target", test])
    if built.returncode != 0:
        raise NotFoundError(f"does not compile:\n{built.stdout}{built.stderr}")


def search(caught_by: str, jobs: int) -> Finding | None:
    """Run the detector on the copy. The time does not include builds."""
    kind, _, detector = caught_by.partition(":")
    if kind == "model":
        command = [sys.executable, NATIVE / "model" / "check.py", "--source", SOURCE / "native"]
        command += ["--only", f"^{detector}$"]
    else:
        build(kind, detector, jobs)
        command = [WORK / kind / "native" / "tests" / detector]
        if kind == "thread" and run(["setarch", "-R", "true"]).returncode == 0:
            command = ["setarch", "-R", *command]
    start = time.monotonic()
    try:
        result = run(command, LIMITS[kind])
    except subprocess.TimeoutExpired:
        return Finding(LIMITS[kind], "does not end")
    if result.returncode == 0:
        return None
    return Finding(time.monotonic() - start, summarize(result.stdout + result.stderr))


def summarize(output: str) -> str:
    """Return the most informative line of the output."""
    patterns = [
        r"WARNING: ThreadSanitizer: (.*?) \(pid",
        r"FAILED: ?(.*)",
        r"\*\*(.*)\*\* \| (.*) \|",
        r"FAILED (.*)",
        r"failed: (.*)",
    ]
    for pattern in patterns:
        if found := re.search(pattern, output):
            return " in ".join(found.groups())
    return output.strip().splitlines()[-1] if output.strip() else "no output"


def copy_source() -> None:
    """Copy the source. Unchanged files keep their times, so that only changed ones are compiled."""
    SOURCE.mkdir(parents=True, exist_ok=True)
    for file in [ROOT / "CMakeLists.txt", *NATIVE.rglob("*")]:
        copy = SOURCE / file.relative_to(ROOT)
        if file.suffix not in {".txt", ".h", ".cpp", ".inc"} or not file.is_file():
            continue
        if not copy.exists() or copy.read_bytes() != file.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    for copy in SOURCE.rglob("*.*"):
        if copy.is_file() and not (ROOT / copy.relative_to(SOURCE)).exists():
            copy.unlink()


def check_applies(mutants: list[Mutant]) -> None:
    for mutant in mutants:
        mutated(mutant, (NATIVE / mutant.file).read_text())


def check_detectors(mutants: list[Mutant], jobs: int) -> None:
    """Check that the detectors find nothing in the core without a mutant."""
    for caught_by in sorted({mutant.caught_by for mutant in mutants}):
        if finding := search(caught_by, jobs):
            raise NotFoundError(f"{caught_by} fails without a mutant: {finding.output}")
        print(f"passes without a mutant: {caught_by}", flush=True)


def write_result(rows: dict[str, str]) -> None:
    """Write RESULT.md; rows of mutants that were not run this time stay as they are."""
    if RESULT.exists():
        rows = {row.split(" | ")[0][2:]: row for row in RESULT.read_text().splitlines()} | rows
    kept = [rows[mutant.name] for mutant in MUTANTS if mutant.name in rows]
    missed = sum(MISSED in row for row in kept)
    text = [
        "# Result of `make mutants ARGS=--record`",
        "Seconds are those of the test or model that found the mutant, without the build.",
        "\n".join([*TABLE, *kept]),
        f"{len(kept)} mutants, {missed} not found.",
    ]
    RESULT.write_text("\n\n".join(text) + "\n")


def find_all(mutants: list[Mutant], jobs: int, record: bool) -> int:
    rows = dict[str, str]()
    print("\n" + "\n".join(TABLE), flush=True)
    missed = 0
    for mutant in mutants:
        with seeded(mutant):
            finding = search(mutant.caught_by, jobs)
        if finding is None:
            missed += 1
            finding = Finding(0, MISSED)
        output = finding.output.replace("|", "\\|").strip()[:100]
        row = f"| {mutant.name} | {mutant.caught_by} | {finding.seconds:.1f} | {output} |"
        rows[mutant.name] = row
        print(row, flush=True)
    print(f"\n{len(mutants)} mutants, {missed} not found")
    if record:
        write_result(rows)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description="Seed mistakes and check that they are found.")
    parser.add_argument("--check", action="store_true", help="only check that all mutants apply")
    parser.add_argument(
        "--only", nargs="+", default=[], help="mutants whose name contains one of these"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--record", action="store_true", help="write RESULT.md")
    options = parser.parse_args()
    mutants = [
        mutant
        for mutant in MUTANTS
        if not options.only or any(word in mutant.name for word in options.only)
    ]
    try:
        check_applies(mutants)
        if options.check:
            print(f"{len(mutants)} mutants apply")
            return
        copy_source()
        check_detectors(mutants, options.jobs)
        missed = find_all(mutants, options.jobs, options.record)
    except NotFoundError as error:
        sys.exit(str(error))
    sys.exit(missed != 0)


if __name__ == "__main__":
    main()
