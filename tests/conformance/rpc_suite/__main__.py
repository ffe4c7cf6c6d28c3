"""`make conformance-rpc`: run PyTorch's RPC suite, record the outcomes, write the table."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from tests.conformance.rpc_suite import record
from tests.conformance.rpc_suite.runner import COLUMNS, LOGS, run
from tests.conformance.torch_suite.progress import SuiteProgress


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("make conformance-rpc", description=__doc__)
    parser.add_argument(
        "-k", default="", metavar="WORD", help="only tests whose name contains WORD"
    )
    parser.add_argument("--column", action="append", choices=COLUMNS)
    parser.add_argument(
        "--failing",
        action="store_true",
        help="only tests that PyTorch's RPC passes and phalanx.rpc does not",
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent tests")
    parser.add_argument("--limit", type=int, default=60, help="time limit of a test, in seconds")
    parser.add_argument("--no-record", action="store_true", help="do not update the record")
    return parser.parse_args()


def main() -> int:
    args, console, results = (
        parse_options(),
        Console(highlight=False, soft_wrap=True),
        record.load(),
    )
    failing = {test for test, _ in record.find_regressions(results)}

    def is_chosen(test: str) -> bool:
        return args.k in test and (not args.failing or test in failing)

    for column in args.column or COLUMNS:
        with SuiteProgress(console) as display:
            begin, report = display.follow(record.TITLES[column])
            outcomes = run(
                column, is_chosen, jobs=args.jobs, limit=args.limit, begin=begin, report=report
            )
        if args.k and not args.failing and not outcomes:
            sys.exit(f"-k {args.k!r}: expected a part of a test's name, as in RpcTest.test_add")
        if args.k or args.failing:
            results[column] |= outcomes
        else:
            results[column] = outcomes
        if not args.no_record:
            record.store(results)
        if args.k:
            for test, outcome in sorted(outcomes.items()):
                console.print(f"{test}: {outcome.outcome} {outcome.reason}", markup=False)
    regressions = [each for each in record.find_regressions(results) if args.k in each[0]]
    for test, outcome in regressions:
        reason = record.cause(outcome.reason)
        console.print(f"{test}: {outcome.outcome}: {reason}", markup=False)
    console.print(
        f"{len(regressions)} tests pass on PyTorch's RPC but not on phalanx.rpc; logs: {LOGS}"
    )
    return bool(regressions)


if __name__ == "__main__":
    sys.exit(main())
