"""Run checks and tests to the end, whatever fails on the way, and print one table.

`make test`, `make test-long` and `.ci/run` are calls of it, with names of sections. A test that
fails is run again when all sections have ended, with nothing beside it. If it passes then, it is
*unstable*, a defect of the test or of the product that is still to be mended: the table names it.
The run fails if a test fails twice, if a check fails, or if more than three tests are unstable.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = Path("build/gate")
"""The directory of the records: `result.json`, and what pytest and ctest leave."""

PASSED = Path("native/passed.json")
"""The digests of the sources with which sections passed last. It is committed with the sources."""

EXIT_CODE = "gate/exit_code"
"""The key of pytest's exit code in its cache; make hides the code."""

MAX_UNSTABLE = 3
"""The number of unstable tests that a run may have and pass."""
MAX_RERUN = 20
"""The number of failed tests of a section above which none is run again, as something is broken."""
POLL = 0.5
"""The time between two looks at whether a section should end, in seconds."""
KILL_AFTER = 10.0
"""The time that an interrupted section has to end, in seconds."""

CHOICES = ("PHALANX_PRELOAD", "PHALANX_TEST_COPIES")
"""Environment variables that sections set. Those of the caller, set for tests by hand, are left."""


@dataclass
class Result:
    """The outcome of a section; a check is one test."""

    section: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    seconds: float = 0.0
    is_known: bool = False
    """True if it was not run, as it has passed with the same sources."""


@dataclass(frozen=True)
class Section:
    """A make target that passes or fails as a whole.

    Args:
        name: The name in the table.
        target: The arguments of make.
        sources: The files and directories that alone decide whether it passes. Then it is run only
            if they differ from those with which it passed last, as `PASSED` says.
    """

    name: str
    target: Sequence[str]
    sources: Sequence[str] = ()

    def run(self, seconds: float | None) -> Result:
        """Run the section; interrupt it after `seconds`."""
        code = run_make(self.target, seconds)
        return Result(self.name, passed=int(code == 0), failed=[self.name] if code else [])

    @property
    def counts(self) -> Path:
        """The file in JUnit's format in which the program counts its tests."""
        return RECORDS.absolute() / f"{self.name}.xml"


@dataclass(frozen=True)
class PythonTests(Section):
    """A run of pytest, which keeps the names of failed tests in its cache."""

    def run(self, seconds: float | None) -> Result:
        """Run the tests, several files at a time."""
        shutil.rmtree(self._cache, ignore_errors=True)
        self.counts.unlink(missing_ok=True)
        options = f"--junitxml={self.counts} -o cache_dir={self._cache}"
        code = run_make([*self.target, f"OPTIONS={options}"], seconds)
        # A run that was cut off has not come to all of its tests: it is no run to the end.
        is_whole = self._read(EXIT_CODE) in (0, 1)
        return _count(self, code, [self.name] * (not is_whole) + self._read_failed())

    def run_again(self, failed: Sequence[str], seconds: float | None) -> list[str]:
        """Run failed tests one after another, and return those that fail again."""
        options = f"-m '' --last-failed --last-failed-no-failures=none -o cache_dir={self._cache}"
        variables = [each for each in self.target if "=" in each]
        run_make(["pytest", *variables, f"ARGS={options}"], seconds)
        again = self._read_failed()
        return [name for name in failed if name in again]

    @property
    def _cache(self) -> Path:
        return RECORDS.absolute() / self.name

    def _read_failed(self) -> list[str]:
        return list(self._read("cache/lastfailed") or [])

    def _read(self, key: str) -> Any:
        """Return what pytest has left in its cache under this key; None if there is nothing."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self._cache / "v" / key).read_text())
        return None


@dataclass(frozen=True)
class NativeTests(Section):
    """A run of ctest, which keeps the names of failed tests beside the build."""

    def run(self, seconds: float | None) -> Result:
        """Build and run the test programs of the core."""
        for path in (self.counts, self._log):
            path.unlink(missing_ok=True)
        code = run_make([*self.target, f"OPTIONS=--output-junit {self.counts}"], seconds)
        return _count(self, code, self._read_failed())

    def run_again(self, failed: Sequence[str], seconds: float | None) -> list[str]:
        """Run failed programs one after another, and return those that fail again."""
        code = run_make([*self.target, "OPTIONS=--rerun-failed --parallel 1"], seconds)
        return self._read_failed() or list(failed) if code else []

    @property
    def _log(self) -> Path:
        return Path("build", self.name, "native/Testing/Temporary/LastTestsFailed.log")

    def _read_failed(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [line.partition(":")[2] for line in self._log.read_text().splitlines()]
        return []


NATIVE = ("native", "CMakeLists.txt", ".clang-tidy")

GENERAL = (
    "tests/conformance",
    *(f"tests/fault/test_{name}.py" for name in ("abort", "deadlines", "messages", "mismatch")),
    *(
        f"tests/multiprocess/test_{name}.py"
        for name in ("backend_works", "blocking_messages", "callbacks", "gradients")
    ),
)
"""The tests of operations, which are run again without direct calls.

Not those of prepared operations, which look at what the core runs: without direct calls these are
plain calls.
"""

LAYERS: dict[str, list[Section]] = {
    "test": [
        Section("lint", ("lint",)),
        NativeTests("native-plain", ("native-plain",)),
        PythonTests("tests", ("pytest", "SELECT=not slow and not long")),
    ],
    "test-long": [
        Section("tidy", ("--jobs", str(os.cpu_count()), "--output-sync=target", "tidy"), NATIVE),
        NativeTests("native-asan", ("native-asan",), NATIVE),
        NativeTests("native-tsan", ("native-tsan",), NATIVE),
        # Ranks and launchers are copies here, which start sooner (tests/copies.py); in `make test`
        # they start by themselves.
        PythonTests(
            "slow-tests",
            (
                "pytest",
                "PHALANX_PRELOAD=torch",
                "PHALANX_TEST_COPIES=1",
                "SELECT=slow and not long",
            ),
        ),
        # What `make test` shows of operations, without direct calls.
        PythonTests(
            "general-tests",
            (
                "pytest",
                "PHALANX_DIRECT_CALLS=0",
                "SELECT=not slow and not long",
                f"TESTS={' '.join(GENERAL)}",
            ),
        ),
        Section("docs", ("docs",)),
    ],
}


def compute_digest(sources: Sequence[str]) -> str:
    """Return a digest of the names and contents of files, and of all files in directories."""
    digest = hashlib.sha256()
    for source in sources:
        root = Path(source)
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.is_file() and path != PASSED and "__pycache__" not in path.parts:
                data = path.read_bytes()
                digest.update(f"{path.as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def run_make(arguments: Sequence[str], seconds: float | None) -> int:
    """Run make, and return its exit code; interrupt it after `seconds`."""
    # The options of `make test-all ARGS=...` are not those of its sections.
    command = ["make", "--no-print-directory", "ARGS=", "OPTIONS=", *arguments]
    deadline = None if seconds is None else time.monotonic() + seconds
    parent = os.getppid()
    environment = {name: text for name, text in os.environ.items() if name not in CHOICES}
    process = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, env=environment
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL)
            if os.getppid() != parent:
                sys.exit("gate: its parent has ended")
            if deadline is not None and time.monotonic() > deadline:
                message = f"\ngate: {' '.join(arguments)} had to end after {seconds:.0f} s"
                print(message, file=sys.stderr)
                return 124
        return process.returncode
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the processes of a section that still run: pytest prints its summary when interrupted."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_AFTER)


def _count(section: Section, code: int, failed: list[str]) -> Result:
    """Read how many tests have passed; a failure that names no test is that of the section."""
    passed = 0
    with contextlib.suppress(FileNotFoundError, xml.etree.ElementTree.ParseError):
        for suite in xml.etree.ElementTree.parse(section.counts).iter("testsuite"):
            others = sum(int(suite.get(key) or 0) for key in ("failures", "errors", "skipped"))
            passed += int(suite.get("tests") or 0) - others
    if code and not failed:
        failed = [section.name]
    return Result(section.name, passed=max(passed, 0), failed=failed)


def run(
    sections: Sequence[Section], limit: float | None = None, say: Callable[[str], None] = print
) -> int:
    """Run sections in the current directory, then failed tests alone; return the exit code.

    Args:
        sections: The sections, in their order.
        limit: The time for all of them, in seconds. None means no limit.
        say: A function that prints a line.
    """
    start = time.monotonic()

    def left() -> float | None:
        return None if limit is None else max(1.0, start + limit - time.monotonic())

    RECORDS.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    for number, section in enumerate(sections, 1):
        say(f"\n== Section {number} of {len(sections)}: {section.name}")
        began = time.monotonic()
        digest = compute_digest(section.sources)
        if section.sources and passed.get(section.name) == digest:
            say(f"\n== {section.name}: passed with the same {', '.join(section.sources)}")
            results.append(Result(section.name, passed=1, is_known=True))
            continue
        results.append(section.run(left()))
        results[-1].seconds = time.monotonic() - began
        if section.sources and not results[-1].failed:
            passed[section.name] = digest
            PASSED.write_text(json.dumps(passed, indent=1, sort_keys=True) + "\n")
    for section, result in zip(sections, results, strict=True):
        if not isinstance(section, PythonTests | NativeTests) or section.name in result.failed:
            continue
        if 0 < len(result.failed) <= MAX_RERUN:
            say(f"\n== Again, alone: {', '.join(result.failed)}")
            began = time.monotonic()
            again = section.run_again(result.failed, left())
            result.unstable = [name for name in result.failed if name not in again]
            result.passed += len(result.unstable)
            result.failed = again
            result.seconds += time.monotonic() - began
    (RECORDS / "result.json").write_text(json.dumps([asdict(each) for each in results], indent=1))
    return _report(results, time.monotonic() - start, say)


def _report(results: Sequence[Result], seconds: float, say: Callable[[str], None]) -> int:
    """Print the table, and return the exit code."""
    failed = [name for result in results for name in result.failed]
    unstable = [name for result in results for name in result.unstable]
    width = max(len(result.section) for result in results)
    say(f"\n{'section':{width}}  passed  failed  unstable    time")
    for result in results:
        counts = f"{result.passed:6}  {len(result.failed):6}  {len(result.unstable):8}"
        time_taken = "known" if result.is_known else _minutes(result.seconds)
        say(f"{result.section:{width}}  {counts}  {time_taken:>6}")
    say("")
    for name in unstable:
        say(f"unstable: {name}")
    for name in failed:
        say(f"FAILED: {name}")
    if len(unstable) > MAX_UNSTABLE:
        say(f"FAILED: {len(unstable)} tests are unstable; at most {MAX_UNSTABLE} may be")
    passed = sum(result.passed for result in results)
    say(f"{passed} passed, {len(failed)} failed in {_minutes(seconds)}")
    return int(bool(failed) or len(unstable) > MAX_UNSTABLE)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """Leave pytest's exit code in its cache, if it has one; a hook of `tests/conftest.py`."""
    cache = getattr(session.config, "cache", None)  # None with -p no:cacheprovider
    if cache is not None and not hasattr(session.config, "workerinput"):  # of pytest-xdist
        cache.set(EXIT_CODE, int(exitstatus))


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def main() -> int:
    """Run the layers or sections that the command line names."""
    sections = {section.name: [section] for layer in LAYERS.values() for section in layer}
    names = {**LAYERS, **sections}
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "names", nargs="+", choices=names, metavar="NAME", help=f"one of: {', '.join(names)}"
    )
    parser.add_argument("--limit", type=float, help="seconds for all of it; none by default")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    chosen = [section for name in arguments.names for section in names[name]]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Sections have sessions of their own, to be ended with all that they started: by an exception.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    return run(chosen, limit=arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
