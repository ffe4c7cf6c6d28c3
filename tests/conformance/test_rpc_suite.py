"""A part of PyTorch's RPC suite: tests that pass on `phalanx.rpc`, by the record, still pass.

`make conformance-rpc` runs all of it and makes the record.
"""

from __future__ import annotations

import pytest

from tests.conformance.rpc_suite import record
from tests.conformance.rpc_suite.runner import run

# Seconds in the record beyond which a test is left to `make conformance-rpc`.
SLOW = 2.0
COUNT = 50


@pytest.mark.timeout(300)
def test_what_has_passed_passes() -> None:
    passed = sorted(
        test
        for test, outcome in record.load()["phalanx"].items()
        if outcome.outcome == "pass" and outcome.seconds < SLOW
    )
    # Evenly over all classes of tests.
    expected = set(passed[:: max(1, len(passed) // COUNT)])
    outcomes = run("phalanx", expected.__contains__, jobs=2, limit=60)
    assert outcomes.keys() == expected, "the record is outdated: run make conformance-rpc"
    worse = {
        test: f"{outcome.outcome}: {outcome.reason}"
        for test, outcome in outcomes.items()
        if outcome.outcome != "pass"
    }
    assert not worse, "\n".join(f"{test}: {why}" for test, why in worse.items())
    assert len(outcomes) >= COUNT
