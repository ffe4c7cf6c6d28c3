"""A sample of PyTorch's RPC suite: tests that pass according to the record still pass.

`make conformance-rpc` runs the whole suite and writes the record.
"""

from __future__ import annotations

import pytest

from tests.conformance.rpc_suite import record
from tests.conformance.rpc_suite.runner import run

# Tests that took longer, in seconds, are left to `make conformance-rpc`.
SLOW = 2.0
COUNT = 50


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recorded_passes_still_pass() -> None:
    passed = sorted(
        test
        for test, outcome in record.load()["phalanx"].items()
        if outcome.outcome == "pass" and outcome.seconds < SLOW
    )
    # Spread evenly over all classes of tests.
    expected = set(passed[:: max(1, len(passed) // COUNT)])
    outcomes = run("phalanx", expected.__contains__, jobs=2, limit=60)
    assert outcomes.keys() == expected, "the record is outdated: run make conformance-rpc"
    regressions = {
        test: f"{outcome.outcome}: {outcome.reason}"
        for test, outcome in outcomes.items()
        if outcome.outcome != "pass"
    }
    assert not regressions, "\n".join(f"{test}: {reason}" for test, reason in regressions.items())
    assert len(outcomes) >= COUNT
