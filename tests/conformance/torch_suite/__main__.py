"""`make conformance`: run the suite, record the outcomes, write the table."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from tests.conformance.torch_suite import record
from tests.conformance.torch_suite.progress import SuiteProgress
from tests.conformance.torch_suite.runner import COLUMNS, SIZES, run


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("make conformance", description=__doc__)
    parser.add_argument("-k", default="", metavar="WORD", help="only tests with this in their name")
    parser.add_argument("--world-size", type=int, action="append", choices=SIZES)
    parser.add_argument("--column", action="append", choices=COLUMNS)
    parser.add_argument(
        "--failing", action="store_true", help="only what Gloo passed and the column didn't"
    )
    parser.add_argument("--jobs", type=int, default=2, help="tests that run at a time")
    parser.add_argument("--limit", type=int, default=90, help="seconds that a test may take")
    return parser.parse_args()


def main() -> int:
    args, console, results = options(), Console(highlight=False), record.load()
    with SuiteProgress(console) as show:
        for column in args.column or COLUMNS:
            for size in args.world_size or SIZES:
                failing = {t for t, n, _ in record.missing(results, column) if n == size}
                one(args, show, results, column, size, failing)
    found = [(c, *entry) for c in COLUMNS for entry in record.missing(results, c)]
    for column, test, size, outcome in found:
        console.print(f"{record.TITLES[column]}, {size} ranks: {test}: {outcome.outcome}")
    console.print(f"{len(found)} outcomes behind Gloo's; see {record.TABLE}")
    return bool(found)


def one(
    args: argparse.Namespace,
    show: SuiteProgress,
    results: record.Results,
    column: str,
    size: int,
    failing: set[str],
) -> None:
    """Run and record one column at one world size."""
    begin, report = show.follow(f"{record.TITLES[column]}, {size} ranks")
    results[column][size] |= run(
        column,
        size,
        lambda test: args.k in test and (not args.failing or test in failing),
        jobs=args.jobs,
        limit=args.limit,
        begin=begin,
        report=report,
    )
    record.store(results)


if __name__ == "__main__":
    sys.exit(main())
