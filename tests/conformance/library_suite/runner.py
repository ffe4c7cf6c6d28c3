"""The runner of PyTorch's test files, file by file, on Gloo or with Phalanx replacing it."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.conformance.library_suite.scope import CPU_DEVICES, suite_of
from tests.conformance.torch_suite.runner import ROOT, Outcome, Server, run_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["COLUMNS", "IMPORT", "LOGS", "run"]

# The name that stands for all tests of a file that cannot be imported.
IMPORT = "import"

# The environment that selects each of them.
COLUMNS: dict[str, dict[str, str]] = {"gloo": {}, "phalanx": {"PHALANX_REPLACE": "gloo"}}
LOGS = ROOT / "build" / "conformance-libraries"


def run(
    column: str,
    checkout: Path,
    files: Iterable[str],
    chosen: Callable[[str], bool],
    *,
    jobs: int,
    limit: int,
    report: Callable[[str, Outcome], None] = lambda _test, _outcome: None,
) -> dict[str, Outcome]:
    """Run the chosen tests of some files; blocks until all have ended.

    Args:
        column: A column of `COLUMNS`.
        checkout: The source of PyTorch.
        files: Their paths, relative to test/distributed.
        chosen: Returns whether to run a test, given as `file::Class.name`.
        jobs: The number of tests that run at a time.
        limit: The time limit of a test, in seconds.
        report: Called after each test, from several threads, one at a time.

    Returns:
        The outcome of each test.
    """
    outcomes: dict[str, Outcome] = {}

    def record(test: str, outcome: Outcome) -> None:
        outcomes[test] = outcome
        report(test, outcome)

    # Its path is short: tests put sockets there, whose paths have at most 107 bytes.
    with TemporaryDirectory() as scratch:
        for file in files:

            def start(file: str = file) -> Server:
                return _server(column, checkout, file, limit, scratch)

            try:
                run_on(
                    start,
                    lambda test, file=file: chosen(f"{file}::{test}"),
                    jobs=jobs,
                    report=lambda test, outcome, file=file: record(f"{file}::{test}", outcome),
                )
            except RuntimeError as error:
                record(f"{file}::{IMPORT}", Outcome("fail", str(error), 0.0))
    return outcomes


def _server(column: str, checkout: Path, file: str, limit: int, scratch: str) -> Server:
    folder = LOGS / column / file.removesuffix(".py")
    environment = {
        **COLUMNS[column],
        "LIBRARY_SUITE_FILE": str((checkout / "test" / "distributed" / file).resolve()),
        "LIBRARY_SUITE_CPU_DEVICES": str(CPU_DEVICES.get(suite_of(file), 0)),
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        "TMPDIR": scratch,
    }
    return Server(f"{__package__}.server", folder, environment, limit)
