"""`make conformance-libraries`: run PyTorch's tests of its libraries, and record the outcomes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tests.conformance.library_suite import record, source
from tests.conformance.library_suite.runner import COLUMNS, LOGS, run
from tests.conformance.torch_suite.progress import SuiteProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conformance.torch_suite.runner import Outcome


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("make conformance-libraries", description=__doc__)
    parser.add_argument("checkout", type=Path, help="PyTorch's source, of the release in use")
    parser.add_argument(
        "-k", default="", metavar="WORD", help="only tests with this in their file or name"
    )
    parser.add_argument("--column", action="append", choices=COLUMNS)
    parser.add_argument(
        "--failing", action="store_true", help="only tests that pass on Gloo, and not on Phalanx"
    )
    parser.add_argument("--jobs", type=int, default=1, help="tests that run at a time")
    parser.add_argument("--limit", type=int, default=60, help="seconds that a test may take")
    parser.add_argument("--no-record", action="store_true", help="leave the record as it is")
    parser.add_argument(
        "--other-release", action="store_true", help="take test files of another release"
    )
    return parser.parse_args()


def main() -> int:
    args, console, results = options(), Console(highlight=False, soft_wrap=True), record.load()
    try:
        release = source.require_release(args.checkout, is_other_allowed=args.other_release)
    except ValueError as error:
        sys.exit(str(error))
    for pattern in source.missing_patterns(args.checkout):
        console.print(f"no file matches {pattern} in {args.checkout}", markup=False)
    files = [file for suite in source.suites(args.checkout).values() for file in suite]
    files = [file for file in files if args.k in file] or files
    failing = {test for test, _ in record.unexplained_failures(results)}
    if args.failing:
        files = [file for file in files if any(test.startswith(f"{file}::") for test in failing)]

    def is_chosen(test: str) -> bool:
        return args.k in test and (not args.failing or test in failing)

    columns = args.column or list(COLUMNS)
    for column in columns:
        outcomes = _run(args, console, column, files, is_chosen)
        if args.k or args.failing:
            record.merge(results[column], outcomes)
        else:
            results[column] = outcomes
        if not args.no_record:
            record.store(results, release)
    _repeat(args, console, results, columns)
    if not args.no_record:
        record.store(results, release)
    found = [each for each in record.unexplained_failures(results) if args.k in each[0]]
    for test, outcome in found:
        console.print(f"{test}: {outcome.outcome}: {outcome.reason}", markup=False)
    console.print(f"{len(found)} tests behind Gloo; the logs are in {LOGS}")
    return bool(found)


def _run(
    args: argparse.Namespace,
    console: Console,
    column: str,
    files: list[str],
    is_chosen: Callable[[str], bool],
) -> dict[str, Outcome]:
    with SuiteProgress(console) as show:
        _, report = show.follow(record.TITLES[column])
        return run(
            column,
            args.checkout,
            files,
            is_chosen,
            jobs=args.jobs,
            limit=args.limit,
            report=report,
        )


def _repeat(
    args: argparse.Namespace, console: Console, results: record.Results, columns: list[str]
) -> None:
    """Run the tests that failed on Phalanx alone again, on both."""
    again = {test for test, _ in record.unexplained_failures(results) if args.k in test}
    if not again or set(columns) != set(COLUMNS):
        return
    files = sorted({test.partition("::")[0] for test in again})
    for column in columns:
        for test, outcome in _run(args, console, column, files, again.__contains__).items():
            results[column][test] = record.repeated(results[column][test], outcome)


if __name__ == "__main__":
    sys.exit(main())
