"""A part of PyTorch's own suite: recorded tests that pass on Gloo pass on Phalanx.

`make conformance` runs all of it, at more world sizes, and writes the record.
"""

from __future__ import annotations

import pytest

from tests.conformance.torch_suite import record
from tests.conformance.torch_suite.runner import SIZES, Outcome, run

# The duration on Gloo, in seconds, beyond which only `make conformance` runs a test.
SLOW = 2.0
# Tests of DDP take most of the time, so they run in one column only.
COLUMNS = {"replace": (2, ""), "phalanx": (3, "ddp")}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("column", COLUMNS)
def test_tests_that_pass_on_gloo(column: str) -> None:
    size, left_out = COLUMNS[column]
    expected = {
        test
        for test, outcome in record.load()["gloo"][size].items()
        if outcome.outcome == "pass"
        and outcome.seconds < SLOW
        and (column, test) not in record.EXPLAINED
        and not (left_out and left_out in test.lower())
    }
    outcomes = run(column, size, expected.__contains__, jobs=2, limit=60)
    assert outcomes.keys() == expected, "the record is of another PyTorch: run make conformance"
    behind = {
        test: f"{outcome.outcome}: {outcome.reason}"
        for test, outcome in outcomes.items()
        if outcome.outcome != "pass" and not (column == "phalanx" and outcome.outcome == "skip")
    }
    assert not behind, "\n".join(f"{test}: {why}" for test, why in behind.items())
    assert sum(outcome.outcome == "pass" for outcome in outcomes.values()) > 30


def test_the_record_has_nothing_behind_gloo() -> None:
    results = record.load()
    for column, sizes in results.items():
        for size, tests in sizes.items():
            assert tests.keys() == results["gloo"][size].keys(), f"{column}, {size} ranks"
        assert not list(record.missing(results, column))


def test_missing_tests() -> None:
    passed, failed, skipped = (Outcome(kind, "", 1.0) for kind in ("pass", "fail", "skip"))
    explained = next(test for column, test in record.EXPLAINED if column == "replace")
    gloo = {"a": passed, "b": passed, "c": skipped, "d": failed, explained: passed}
    ours = {"a": failed, "b": skipped, "c": failed, "d": failed, explained: failed}
    results = {column: {size: {} for size in SIZES} for column in ("gloo", "phalanx", "replace")}
    for column, outcomes in (("gloo", gloo), ("phalanx", ours), ("replace", ours)):
        results[column][3] = outcomes
    assert list(record.missing(results, "replace")) == [("a", 3, failed), ("b", 3, skipped)]
    assert list(record.missing(results, "phalanx")) == [("a", 3, failed), (explained, 3, failed)]
